// One exception type for each kind of error; the bindings turn them into the classes of app/errors.py.
#pragma once

#include <stdexcept>
#include <string>

namespace kvferry {

// The caller's fault.
struct BadInput : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// Counts or positions of source and destination differ (a kind of BadInput in Python too).
struct PageMismatch : BadInput {
  using BadInput::BadInput;
};

// Our fault: a structure contradicts itself.
struct IntegrityError : std::logic_error {
  using std::logic_error::logic_error;
};

}  // namespace kvferry
