// A few threads for one call over much memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <exception>
#include <thread>
#include <utility>
#include <vector>

namespace kvferry {

// Threads that pay for `bytes` of memory traffic: `wanted`, or by size and usable CPUs when that is 0.
unsigned workers_for(std::size_t bytes, unsigned wanted);

// Calls work(begin, end) on parts that tile 0..count, one of them in the calling thread, and returns when all have
// ended. What one of them throws is thrown again then (the first by position). A thread that cannot be had leaves
// its part, and those behind it, to the calling thread.
template <typename Work>
void in_parts(std::size_t count, unsigned workers, const Work& work) {
  const std::size_t parts = std::clamp<std::size_t>(workers, 1, std::max<std::size_t>(count, 1));
  if (parts == 1) {
    work(std::size_t{0}, count);
    return;
  }
  const auto edge = [&](std::size_t part) { return count / parts * part + std::min(part, count % parts); };
  std::vector<std::exception_ptr> failures(parts);
  const auto run = [&work, &failures](std::size_t part, std::size_t begin, std::size_t end) noexcept {
    try {
      work(begin, end);
    } catch (...) {
      failures[part] = std::current_exception();
    }
  };
  std::vector<std::thread> threads;
  threads.reserve(parts - 1);
  std::size_t next = 1;
  try {
    for (; next < parts; ++next) {
      threads.emplace_back(run, next, edge(next), edge(next + 1));
    }
  } catch (...) {  // no thread, or no memory for one
    run(next, edge(next), count);
  }
  run(0, 0, edge(1));
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (const std::exception_ptr& failure : failures) {
    if (failure) {
      std::rethrow_exception(failure);
    }
  }
}

}  // namespace kvferry
