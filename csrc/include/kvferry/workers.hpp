// A few threads for one call over much memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace kvferry {

// Threads that pay for `bytes` of memory traffic: `wanted`, or by size and usable CPUs when that is 0.
unsigned workers_for(std::size_t bytes, unsigned wanted);

// Calls work(begin, end) on parts that tile 0..count, one of them in the calling thread. `work` must not
// throw. A thread that cannot be had leaves its part to the calling thread.
template <typename Work>
void in_parts(std::size_t count, unsigned workers, const Work& work) {
  const std::size_t parts = std::clamp<std::size_t>(workers, 1, std::max<std::size_t>(count, 1));
  const auto edge = [&](std::size_t part) { return count / parts * part + std::min(part, count % parts); };
  std::vector<std::thread> threads;
  threads.reserve(parts - 1);
  std::size_t next = 1;
  try {
    for (; next < parts; ++next) {
      threads.emplace_back([&work, begin = edge(next), end = edge(next + 1)] { work(begin, end); });
    }
  } catch (const std::system_error&) {
    work(edge(next), count);
  }
  work(0, edge(1));
  for (std::thread& thread : threads) {
    thread.join();
  }
}

}  // namespace kvferry
