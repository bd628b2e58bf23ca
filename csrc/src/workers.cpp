#include "kvferry/workers.hpp"

#if defined(__linux__)
#include <sched.h>
#endif

namespace kvferry {
namespace {

// Below this a thread costs more than it brings (its start is tens of microseconds).
constexpr std::size_t kBytesPerWorker = std::size_t{4} << 20;
// More than these share one memory controller without being faster.
constexpr unsigned kMostWorkers = 8;

unsigned usable_cpus() {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) {
    return static_cast<unsigned>(CPU_COUNT(&set));
  }
#endif
  return std::max(1U, std::thread::hardware_concurrency());
}

}  // namespace

unsigned workers_for(std::size_t bytes, unsigned wanted) {
  if (wanted != 0) {
    return wanted;
  }
  if (bytes < 2 * kBytesPerWorker) {
    return 1;
  }
  const auto by_size = static_cast<unsigned>(std::min<std::size_t>(bytes / kBytesPerWorker, kMostWorkers));
  return std::min(by_size, usable_cpus());
}

}  // namespace kvferry
