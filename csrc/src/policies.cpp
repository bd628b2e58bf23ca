// The policies that need no statistics: lru, slru, s3fifo.
#include <algorithm>
#include <string>
#include <vector>

#include "kvferry/errors.hpp"
#include "kvferry/policy.hpp"
#include "policy_lhd.hpp"

namespace kvferry {
namespace {

class Lru final : public Policy {
 public:
  explicit Lru(Tier tier) : Policy(tier, 1) {}
  Node* victim() override { return groups_[0].first(); }
  std::pair<std::int64_t, std::uint64_t> rank(const Node* node) const override { return {0, node->use.last}; }

 private:
  Place place(const Node* node) const override { return {0, node->use.last}; }
};

// What was used again is protected, as long as it is not most of what could go.
class Slru final : public Policy {
 public:
  explicit Slru(Tier tier) : Policy(tier, 2) {}
  Node* victim() override {
    Node* fresh = groups_[0].first();
    Node* kept = groups_[1].first();
    const bool too_many = groups_[1].pages > kShare * (groups_[0].pages + groups_[1].pages);
    return fresh == nullptr || (kept != nullptr && too_many) ? kept : fresh;
  }
  std::pair<std::int64_t, std::uint64_t> rank(const Node* node) const override {
    return {node->use.uses > 0, node->use.last};
  }

 private:
  static constexpr double kShare = 0.8;
  Place place(const Node* node) const override {
    return {static_cast<std::uint8_t>(node->use.uses > 0), node->use.last};
  }
};

// Two queues in the order of arrival. The small one takes what nobody remembers, and lets go of what was not used
// there; the rest goes round in the main one, once for each use, at most three.
class S3Fifo final : public Policy {
 public:
  S3Fifo(Tier tier, const Clock& clock) : Policy(tier, 2), clock_(clock) {}
  void entered(Node* node) override {
    Node::Standing& s = standing(node);
    s.queue = node->use.uses > 0;
    s.since = clock_.now << kLaps;
    s.seen = node->use.uses;
  }
  Node* victim() override {
    for (;;) {
      Node* small = groups_[0].first();
      Node* main = groups_[1].first();
      const bool from_small =
          main == nullptr ||
          (small != nullptr && groups_[0].pages >= kShare * (groups_[0].pages + groups_[1].pages));
      Node* node = from_small ? small : main;
      if (node == nullptr || credit(node) == 0) {
        return node;
      }
      withdraw(node);
      Node::Standing& s = standing(node);
      if (rehearsing_) {
        moved_.push_back({node, s.since, s.seen, s.queue});
      }
      s.seen = node->use.uses - (s.queue == 0 ? 0 : credit(node) - 1);
      s.queue = 1;
      s.since = std::max(clock_.now << kLaps, last_ + 1);
      last_ = s.since;
      offer(node);
    }
  }
  void rehearse() override {
    rehearsing_ = true;
    last_before_ = last_;
  }
  void recall() override {
    rehearsing_ = false;
    last_ = last_before_;
    for (; !moved_.empty(); moved_.pop_back()) {
      const auto& [node, since, seen, queue] = moved_.back();
      Node::Standing& s = standing(node);
      const bool offered = s.offered;
      if (offered) {
        withdraw(node);
      }
      s.since = since;
      s.seen = seen;
      s.queue = queue;
      if (offered) {
        offer(node);
      }
    }
  }
  std::pair<std::int64_t, std::uint64_t> rank(const Node* node) const override {
    const Node::Standing& s = standing(node);
    return {credit(node) > 0 ? 1 + s.queue : 0, s.since};
  }

 private:
  static constexpr double kShare = 0.1;
  static constexpr std::uint32_t kMostCredit = 3;
  static constexpr int kLaps = 16;  // bits for the order of those that go round at one time
  std::uint32_t credit(const Node* node) const {
    const std::uint32_t seen = standing(node).seen;
    return node->use.uses > seen ? std::min(node->use.uses - seen, kMostCredit) : 0;
  }
  Place place(const Node* node) const override {
    return {standing(node).queue, standing(node).since};
  }
  struct Moved {
    Node* node;
    std::uint64_t since;
    std::uint32_t seen;
    std::uint8_t queue;
  };
  const Clock& clock_;
  std::uint64_t last_ = 0, last_before_ = 0;
  bool rehearsing_ = false;
  std::vector<Moved> moved_;
};

}  // namespace

void require_policy(std::string_view name) {
  if (std::find(kPolicies.begin(), kPolicies.end(), name) == kPolicies.end()) {
    std::string known;
    for (std::string_view policy : kPolicies) {
      known += (known.empty() ? "" : ", ") + std::string(policy);
    }
    throw BadInput("no eviction policy " + std::string(name) + ": there are " + known);
  }
}

bool learns(std::string_view name) { return name == "s3fifo" || name == "lhd"; }

std::unique_ptr<Policy> make_policy(std::string_view name, Tier tier, const Clock& clock, ReuseHistory* history) {
  require_policy(name);
  if (name == "lru") {
    return std::make_unique<Lru>(tier);
  }
  if (name == "slru") {
    return std::make_unique<Slru>(tier);
  }
  if (name == "s3fifo") {
    return std::make_unique<S3Fifo>(tier, clock);
  }
  return make_lhd(tier, clock, *history);
}

}  // namespace kvferry
