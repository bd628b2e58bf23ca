#include <doctest/doctest.h>

#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kvferry/workers.hpp"

using namespace kvferry;

namespace {

// How many more threads can be had; none of the calls below asks for as many.
std::atomic<int> threads_left{1 << 20};

using Part = std::pair<std::size_t, std::size_t>;

std::vector<Part> parts_of(std::size_t count, unsigned workers) {
  std::mutex mutex;
  std::vector<Part> parts;
  in_parts(count, workers, [&](std::size_t begin, std::size_t end) {
    const std::lock_guard lock(mutex);
    parts.emplace_back(begin, end);
  });
  std::sort(parts.begin(), parts.end());
  return parts;
}

void require_tiled(const std::vector<Part>& parts, std::size_t count) {
  std::size_t next = 0;
  for (const auto& [begin, end] : parts) {
    REQUIRE(begin == next);
    next = end;
  }
  REQUIRE(next == count);
}

}  // namespace

// In front of the real one, so that a test can let it fail.
extern "C" __attribute__((visibility("default"))) int pthread_create(pthread_t* thread,
                                                                     const pthread_attr_t* attributes,
                                                                     void* (*start)(void*), void* argument) {
  using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const auto create = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
  return threads_left-- > 0 ? create(thread, attributes, start, argument) : EAGAIN;
}

TEST_CASE("parts tile the whole, and nobody gets an empty one unless there is nothing") {
  for (const std::size_t count : {0, 1, 2, 3, 7, 8, 100, 101}) {
    for (const unsigned workers : {0U, 1U, 2U, 3U, 8U, 200U}) {
      const auto parts = parts_of(count, workers);
      require_tiled(parts, count);
      REQUIRE(parts.size() == std::clamp<std::size_t>(workers, 1, std::max<std::size_t>(count, 1)));
      for (const auto& [begin, end] : parts) {
        REQUIRE((begin < end || count == 0));
      }
    }
  }
}

TEST_CASE("threads that cannot be had leave their parts to the calling thread") {
  for (int had = 0; had < 4; ++had) {
    threads_left = had;
    const auto parts = parts_of(100, 5);
    threads_left = 1 << 20;
    require_tiled(parts, 100);
    CHECK(parts.size() == static_cast<std::size_t>(had) + 2);  // the rest in one piece, and the caller's own
  }
}

TEST_CASE("what a part throws arrives when all parts have ended, whichever thread threw it") {
  for (std::size_t bad = 0; bad < 4; ++bad) {
    std::atomic<int> ended{0};
    std::string said;
    try {
      in_parts(4, 4, [&](std::size_t begin, std::size_t) {
        if (begin == bad) {
          ++ended;
          throw std::runtime_error("part " + std::to_string(begin));
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        ++ended;
      });
    } catch (const std::runtime_error& error) {
      said = error.what();
    }
    CHECK(said == "part " + std::to_string(bad));
    CHECK(ended == 4);
  }
}

TEST_CASE("of several failures the first by position arrives, also from parts without a thread") {
  for (const int had : {3, 1, 0}) {
    threads_left = had;
    std::string said;
    try {
      in_parts(4, 4, [&](std::size_t begin, std::size_t) {
        if (begin > 0) {
          throw std::runtime_error("part " + std::to_string(begin));
        }
      });
    } catch (const std::runtime_error& error) {
      said = error.what();
    }
    threads_left = 1 << 20;
    CHECK(said == "part 1");
  }
}

TEST_CASE("little work gets no threads, a wish is granted") {
  CHECK(workers_for(0, 0) == 1);
  CHECK(workers_for(1 << 20, 0) == 1);
  CHECK(workers_for(std::size_t{1} << 40, 0) >= 1);
  CHECK(workers_for(std::size_t{1} << 40, 0) <= 8);
  CHECK(workers_for(0, 7) == 7);
}
