#include <doctest/doctest.h>

#include <algorithm>

#include "kvferry/reuse.hpp"

using namespace kvferry;

namespace {

constexpr std::size_t kAges = ReuseHistory::kAges;

// A page for each tick; those of `period` come back after `gap` ticks, once.
void feed(Clock& clock, ReuseHistory& history, std::uint64_t ticks, std::uint64_t gap, std::uint64_t period) {
  for (std::uint64_t i = 0; i < ticks; ++i) {
    ++clock.now;
    history.tick();
    history.use(clock.now * 0x9e3779b97f4a7c15);
    if (clock.now > gap && clock.now % period == 0) {
      history.use((clock.now - gap) * 0x9e3779b97f4a7c15);
    }
  }
}

}  // namespace

TEST_CASE("ages are half octaves without gaps") {
  for (std::uint64_t age = 0; age < 100'000; ++age) {
    const std::size_t at = ReuseHistory::age_of(age);
    REQUIRE(ReuseHistory::begin_of(at) <= age);
    REQUIRE((at + 1 == kAges || age < ReuseHistory::begin_of(at + 1)));
  }
  CHECK(ReuseHistory::age_of(~std::uint64_t{0}) == kAges - 1);
  for (std::size_t age = 0; age + 1 < kAges; ++age) {
    REQUIRE(ReuseHistory::age_of(ReuseHistory::begin_of(age + 1)) == age + 1);
    REQUIRE(ReuseHistory::age_of(ReuseHistory::begin_of(age + 1) - 1) == age);
  }
}

TEST_CASE("without any lesson the order is that of the last use") {
  Clock clock;
  const ReuseHistory history(clock, 64, 1000);
  for (std::size_t c = 0; c < ReuseHistory::kClasses; ++c) {
    for (std::size_t age = 0; age + 1 < kAges; ++age) {
      REQUIRE(history.score(c * kAges + age) > history.score(c * kAges + age + 1));
      REQUIRE(history.score(c * kAges + age) == history.score(age));
    }
  }
}

TEST_CASE("uses are counted as far as anybody remembers") {
  Clock clock;
  ReuseHistory history(clock, 64, 1000);
  CHECK(history.use(7) == 0);
  CHECK(history.use(7) == 1);
  CHECK(history.use(7) == 2);
  CHECK(history.use(7) == 2);  // twice or more is one class
  CHECK(history.use(8) == 0);
  CHECK(history.remembered() == 2);
  for (std::uint64_t i = 0; i < history.capacity(); ++i) {
    history.use(1000 + i);
  }
  CHECK(history.use(7) == 0);
  history.check();
  CHECK(history.remembered() == history.capacity());
}

TEST_CASE("pages that come back after a while are worth most shortly before it") {
  Clock clock;
  ReuseHistory history(clock, 64, 1000);
  feed(clock, history, 20'000, 100, 2);
  history.check();
  const auto score = [&](std::uint64_t age) { return history.score(ReuseHistory::age_of(age)); };
  CHECK(score(99) > 2 * score(20));
  CHECK(score(99) > 2 * score(150));
  CHECK(score(20) > score(150));  // waiting pays, until it is over
  // those that came back once do not come a second time
  CHECK(history.score(kAges + ReuseHistory::age_of(99)) < score(99) / 4);
}

TEST_CASE("what was learnt is unlearnt when the uses change") {
  Clock clock;
  ReuseHistory history(clock, 64, 1000);
  const auto score = [&](std::uint64_t age) { return history.score(ReuseHistory::age_of(age)); };
  feed(clock, history, 20'000, 100, 2);
  feed(clock, history, 40'000, 10, 2);
  CHECK(score(9) > 2 * score(70));
  CHECK(score(70) < score(9));
  history.check();
}

TEST_CASE("a large pool is sampled, a small one remembered whole") {
  Clock clock;
  const ReuseHistory small(clock, 64, 38'000), large(clock, 64, 4'000'000), coarse(clock, 4096, 1000);
  const auto sampled = [](const ReuseHistory& history) {
    int count = 0;
    for (std::uint64_t i = 0; i < 10'000; ++i) {
      count += history.sampled(i * 0x9e3779b97f4a7c15);
    }
    return count;
  };
  CHECK(sampled(small) == 10'000);
  CHECK(sampled(large) > 0);
  CHECK(sampled(large) < 500);
  CHECK(large.capacity() <= ReuseHistory::kMost);
  CHECK(small.grain() == 8);
  CHECK(coarse.grain() == 1);
}
