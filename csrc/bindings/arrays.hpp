// numpy arrays in and out at the least cost of a call: numpy's own C interface, which takes some tens of nanoseconds
// where nanobind's conversions take about a microsecond.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <span>

namespace nb = nanobind;

namespace kvferry::bind {

// Called once, before any other function of this header.
void import_numpy();

// A one-dimensional integer argument as int64 (or int8): the array itself where it is one and contiguous, else a
// converted copy. `keep` owns the memory of `values`.
template <typename T>
struct Input {
  nb::object keep;
  std::span<const T> values;
};

// BadInput, with `what` in its text, on more dimensions, on numbers that are not whole or do not fit.
Input<std::int64_t> int64s(nb::handle object, const char* what);
Input<std::int8_t> int8s(nb::handle object, const char* what);

// A new one-dimensional array of `size` numbers, to be filled through `data`.
nb::object new_int64s(std::size_t size, std::int64_t*& data);

// A writable uint8 array over memory that `owner` keeps alive.
nb::object view_of_bytes(std::span<std::uint8_t> bytes, nb::handle owner);

}  // namespace kvferry::bind
