// Where the bytes of a tree node are, and the only moves between those states.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "kvferry/errors.hpp"

namespace kvferry {

// pending: pages of L2 are reserved and being written; no reader sees them before the last acknowledgement.
// loading: L2 is readable, pages of L1 are taken and being written.
enum class Residency : std::uint8_t { absent, l1, pending, l1_pending, l1_l2, l2, loading };
inline constexpr std::size_t kResidencies = 7;
inline constexpr std::array<std::string_view, kResidencies> kResidencyNames = {
    "absent", "l1", "pending", "l1+pending", "l1+l2", "l2", "loading"};

enum class Event : std::uint8_t { insert, reserve, load, ack, cancel, drop_l1, drop_l2 };
inline constexpr std::array<std::string_view, 7> kEventNames = {"insert", "reserve", "load",   "ack",
                                                                "cancel", "drop_l1", "drop_l2"};

struct Transition {
  Residency from;
  Event event;
  Residency to;
};

inline constexpr std::array kTransitions = {
    Transition{Residency::absent, Event::insert, Residency::l1},
    Transition{Residency::absent, Event::reserve, Residency::pending},
    Transition{Residency::l1, Event::reserve, Residency::l1_pending},
    Transition{Residency::l1, Event::drop_l1, Residency::absent},
    Transition{Residency::pending, Event::insert, Residency::l1_pending},
    Transition{Residency::pending, Event::ack, Residency::l2},
    Transition{Residency::pending, Event::cancel, Residency::absent},
    Transition{Residency::l1_pending, Event::ack, Residency::l1_l2},
    Transition{Residency::l1_pending, Event::cancel, Residency::l1},
    Transition{Residency::l1_l2, Event::drop_l1, Residency::l2},
    Transition{Residency::l1_l2, Event::drop_l2, Residency::l1},
    Transition{Residency::l2, Event::insert, Residency::l1_l2},
    Transition{Residency::l2, Event::load, Residency::loading},
    Transition{Residency::l2, Event::drop_l2, Residency::absent},
    Transition{Residency::loading, Event::ack, Residency::l1_l2},
    Transition{Residency::loading, Event::cancel, Residency::l2},
};

constexpr std::string_view name(Residency r) { return kResidencyNames[static_cast<std::size_t>(r)]; }
constexpr std::string_view name(Event e) { return kEventNames[static_cast<std::size_t>(e)]; }

// The state after `event`; BadInput where the table has no such move.
inline Residency after(Residency from, Event event) {
  for (const Transition& t : kTransitions) {
    if (t.from == from && t.event == event) {
      return t.to;
    }
  }
  throw BadInput("a node that is " + std::string(name(from)) + " allows no " + std::string(name(event)));
}

// Readable in L1, or from L2.
constexpr bool in_l1(Residency r) {
  return r == Residency::l1 || r == Residency::l1_pending || r == Residency::l1_l2;
}
constexpr bool in_l2(Residency r) {
  return r == Residency::l1_l2 || r == Residency::l2 || r == Residency::loading;
}
// Holds pages of the tier, readable or not.
constexpr bool holds_l1(Residency r) { return in_l1(r) || r == Residency::loading; }
constexpr bool holds_l2(Residency r) {
  return in_l2(r) || r == Residency::pending || r == Residency::l1_pending;
}

}  // namespace kvferry
