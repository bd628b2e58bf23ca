// What is known of the uses of prompts: how often pages of each age come back.
//
// A sample of the pages is remembered for much longer than the pages themselves live: every 512 tokens of a
// prompt one chained hash, over some turnovers of the pool. It says of a prompt that comes back after its
// eviction that it had been there, and it gives the rate of uses by age, of pages used once, twice or more often.
//
//   age      0 2 3 4  6  8  12 ...                              (uses of the tree, half octaves)
//   at risk  n n n n  n  n  n      sampled pages of that age    x time = exposure
//   uses     e e e e  e  e  e      of pages of that age         / exposure = rate
//
// score(uses, age) = the best of: expected uses / expected time, over every time that one could go on keeping the page.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvferry {

// Counts uses of the tree: a match that touches is one, an insert is another.
struct Clock {
  std::uint64_t now = 0;
};

class ReuseHistory {
 public:
  static constexpr std::size_t kClasses = 3;  // used 1, 2, more times
  static constexpr std::size_t kAges = 44;
  static constexpr std::size_t kCells = kClasses * kAges;
  static constexpr std::size_t kGrainTokens = 512;  // a page remembered for each
  static constexpr std::size_t kMost = std::size_t{1} << 17;

  ReuseHistory(const Clock& clock, std::size_t page_size, std::int64_t pages);

  static std::size_t class_of(std::uint32_t uses) { return uses < kClasses ? uses : kClasses - 1; }
  static std::size_t age_of(std::uint64_t age);
  // Where an age begins; the last one never ends.
  static std::uint64_t begin_of(std::size_t age);

  // Pages of a prompt are remembered where (index + 1) % grain == 0.
  std::size_t grain() const { return grain_; }
  bool sampled(std::uint64_t hash) const { return (hash >> 40 & sample_mask_) == 0; }

  // Before several calls of use(), the first of these for all of them, then the second: they find what they need
  // in the cache. One use alone waits for three lines of memory, one after the other.
  void prefetch_head(std::uint64_t hash) const { __builtin_prefetch(&heads_[bucket(hash)], 1); }
  void prefetch_entry(std::uint64_t hash) const {
    const std::uint32_t first = heads_[bucket(hash)];
    if (first != kNone) {
      __builtin_prefetch(&entries_[first], 1);
    }
  }

  // Time has moved on.
  void tick();
  // A sampled page is used: how often it had been before, as far as anybody remembers.
  std::uint32_t use(std::uint64_t hash);

  double score(std::size_t cell) const { return scores_[cell]; }
  std::uint64_t version() const { return version_; }  // of the scores
  std::size_t capacity() const { return entries_.size(); }
  std::size_t remembered() const { return live_; }
  void check() const;  // IntegrityError

 private:
  static constexpr std::uint32_t kNone = 0xffffffff;
  struct Entry {
    std::uint64_t hash = 0;
    std::uint64_t used = 0;  // the clock then
    std::uint32_t next = kNone;
    std::uint8_t uses = 0;  // before that, at most kClasses - 1
    std::uint8_t age = 0;
    bool live = false;
  };

  std::size_t bucket(std::uint64_t hash) const { return (hash ^ hash >> 32) & (heads_.size() - 1); }
  Entry& entry(std::uint64_t number) { return entries_[number & (entries_.size() - 1)]; }
  std::size_t cell(const Entry& e) const { return e.uses * kAges + e.age; }
  void expose(std::size_t cell);  // up to now
  void move(std::size_t cell, int by);
  void forget(std::uint32_t index);
  void forget(std::uint32_t* place);  // what a head or an entry leads to
  void learn();

  const Clock& clock_;
  std::size_t grain_;
  std::uint64_t sample_mask_ = 0;
  std::vector<Entry> entries_;  // a ring: number % size
  std::vector<std::uint32_t> heads_;
  std::uint64_t count_ = 0;                    // entries ever made
  std::array<std::uint64_t, kAges> older_{};  // the first entry that is younger than the age
  std::size_t live_ = 0;

  std::array<double, kCells> uses_{}, exposure_{}, at_risk_{}, scores_{};
  std::array<std::uint64_t, kCells> exposed_{};  // until when
  std::uint64_t learnt_at_ = 0, learnt_count_ = 0, version_ = 0;
};

}  // namespace kvferry
