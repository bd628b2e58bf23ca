#include "kvferry/reuse.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <string>

#include "kvferry/errors.hpp"

namespace kvferry {
namespace {

constexpr std::size_t kLeast = 1024;
constexpr std::int64_t kTurnovers = 16;  // that the sample outlives the pages
constexpr std::uint64_t kEvery = 128;    // uses between two lessons
// A rate is believed as if so many sampled pages had come back at the rate of younger ages, or of all classes.
constexpr double kDoubt = 50;
// Where nothing is known, older pages are used less: without any lesson the order is that of the last use.
constexpr double kFading = 0.8;

}  // namespace

ReuseHistory::ReuseHistory(const Clock& clock, std::size_t page_size, std::int64_t pages)
    : clock_(clock), grain_(std::max<std::size_t>(1, kGrainTokens / page_size)) {
  auto wanted = static_cast<std::size_t>(pages) / grain_ * static_cast<std::size_t>(kTurnovers);
  for (; wanted > kMost; wanted /= 2) {
    sample_mask_ = sample_mask_ << 1 | 1;
  }
  entries_.resize(std::bit_ceil(std::max(wanted, kLeast)));
  heads_.resize(entries_.size(), kNone);
  learn();
}

// 0 1 | 2 | 3 | 4 5 | 6 7 | 8..11 | 12..15 | ...
std::size_t ReuseHistory::age_of(std::uint64_t age) {
  if (age < 2) {
    return 0;
  }
  const auto octave = static_cast<std::size_t>(std::bit_width(age)) - 1;
  return std::min(kAges - 1, 2 * octave - 1 + (age >> (octave - 1) & 1));
}

std::uint64_t ReuseHistory::begin_of(std::size_t age) {
  if (age == 0) {
    return 0;
  }
  const std::size_t octave = (age + 1) / 2;
  return (std::uint64_t{1} << octave) + ((age + 1) % 2 == 0 ? 0 : std::uint64_t{1} << (octave - 1));
}

void ReuseHistory::expose(std::size_t cell) {
  exposure_[cell] += at_risk_[cell] * static_cast<double>(clock_.now - exposed_[cell]);
  exposed_[cell] = clock_.now;
}

void ReuseHistory::move(std::size_t cell, int by) {
  expose(cell);
  at_risk_[cell] += by;
}

void ReuseHistory::tick() {
  const std::uint64_t first = count_ - std::min<std::uint64_t>(count_, entries_.size());
  for (std::size_t age = 1; age < kAges; ++age) {
    const std::uint64_t begin = begin_of(age);
    if (begin > clock_.now) {
      break;
    }
    std::uint64_t& number = older_[age];
    for (number = std::max(number, first); number < count_; ++number) {
      Entry& e = entry(number);
      if (e.used + begin > clock_.now) {
        break;
      }
      if (e.live) {
        move(cell(e), -1);
        e.age = static_cast<std::uint8_t>(age);
        move(cell(e), 1);
      }
    }
  }
  if (clock_.now - learnt_at_ >= kEvery) {
    learn();
  }
}

std::uint32_t ReuseHistory::use(std::uint64_t hash) {
  std::uint32_t uses = 0;
  for (std::uint32_t* place = &heads_[bucket(hash)]; *place != kNone; place = &entries_[*place].next) {
    const Entry& e = entries_[*place];
    if (e.hash == hash) {
      uses_[cell(e)] += 1;
      uses = static_cast<std::uint32_t>(class_of(e.uses + 1U));
      forget(place);
      break;
    }
  }
  Entry& e = entry(count_);
  const auto index = static_cast<std::uint32_t>(&e - entries_.data());
  if (e.live) {
    forget(index);
  }
  ++count_;
  ++live_;
  std::uint32_t& head = heads_[bucket(hash)];
  e = Entry{hash, clock_.now, head, static_cast<std::uint8_t>(uses), 0, true};
  head = index;
  move(cell(e), 1);
  return uses;
}

void ReuseHistory::forget(std::uint32_t index) {
  std::uint32_t* place = &heads_[bucket(entries_[index].hash)];
  while (*place != index) {
    place = &entries_[*place].next;
  }
  forget(place);
}

void ReuseHistory::forget(std::uint32_t* place) {
  Entry& e = entries_[*place];
  *place = e.next;
  move(cell(e), -1);
  e.live = false;
  --live_;
}

void ReuseHistory::learn() {
  std::array<double, kAges> rate{}, width{};
  double uses = 0, exposure = 0;
  for (std::size_t c = 0; c < kCells; ++c) {
    expose(c);
    uses += uses_[c];
    exposure += exposure_[c];
  }
  // of all classes; an age about which little is known takes after the one before it
  double before = uses > 0 && exposure > 0 ? uses / exposure : 1e-3;
  for (std::size_t age = 0; age < kAges; ++age) {
    double used = kDoubt, exposed = kDoubt / (age == 0 ? before : before * kFading);
    for (std::size_t k = 0; k < kClasses; ++k) {
      used += uses_[k * kAges + age];
      exposed += exposure_[k * kAges + age];
    }
    rate[age] = before = used / exposed;
    const std::size_t last = std::min(age, kAges - 2);
    width[age] = static_cast<double>(begin_of(last + 1) - begin_of(last));
  }
  for (std::size_t k = 0; k < kClasses; ++k) {
    const double* used = &uses_[k * kAges];
    const double* exposed = &exposure_[k * kAges];
    // how the class compares with all of them where it has been seen; then its own shape
    double seen = kDoubt, expected = kDoubt;
    for (std::size_t age = 0; age < kAges; ++age) {
      seen += used[age];
      expected += exposed[age] * rate[age];
    }
    std::array<double, kAges> comes{}, stays{};  // in an age, for a page that reaches it: a use, the time until then
    for (std::size_t age = 0; age < kAges; ++age) {
      const double own = (used[age] + kDoubt) / (exposed[age] + kDoubt / (rate[age] * seen / expected));
      comes[age] = -std::expm1(-own * width[age]);
      stays[age] = comes[age] / own;
    }
    for (std::size_t from = 0; from < kAges; ++from) {
      double reaches = 1, gain = 0, cost = 0, best = 0;
      for (std::size_t age = from; age < kAges; ++age) {
        gain += reaches * comes[age];
        cost += reaches * stays[age];
        reaches *= 1 - comes[age];
        best = std::max(best, gain / cost);
      }
      scores_[k * kAges + from] = best;
    }
  }
  // what was learnt one history ago counts half
  const double keep = std::exp2(-static_cast<double>(count_ - learnt_count_) / static_cast<double>(entries_.size()));
  for (std::size_t c = 0; c < kCells; ++c) {
    uses_[c] *= keep;
    exposure_[c] *= keep;
  }
  learnt_at_ = clock_.now;
  learnt_count_ = count_;
  ++version_;
}

void ReuseHistory::check() const {
  std::array<double, kCells> at_risk{};
  std::size_t live = 0, chained = 0;
  for (const Entry& e : entries_) {
    if (e.live) {
      ++live;
      at_risk[cell(e)] += 1;
    }
  }
  for (std::size_t b = 0; b < heads_.size(); ++b) {
    for (std::uint32_t index = heads_[b]; index != kNone; index = entries_[index].next) {
      if (!entries_[index].live || bucket(entries_[index].hash) != b || ++chained > live) {
        throw IntegrityError("reuse history: entry " + std::to_string(index) + " is chained wrongly");
      }
    }
  }
  if (live != live_ || chained != live || at_risk != at_risk_) {
    throw IntegrityError("reuse history: " + std::to_string(live) + " pages are remembered, " +
                         std::to_string(chained) + " are chained, " + std::to_string(live_) + " counted");
  }
}

}  // namespace kvferry
