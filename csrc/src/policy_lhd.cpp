// Least hit density: the node goes whose pages promise the fewest uses for the time that they would stay.
//
// After "LHD: Improving Cache Hit Rate by Maximizing Hit Density" (Beckmann, Chen, Cidon, NSDI 2018), with three
// changes: rates come from a history that outlives the pages, so that nothing depends on what the policy kept; the
// time to keep is chosen for each age instead of until the expected eviction; and the order is exact, not that of
// a random few.
#include "policy_lhd.hpp"

#include <algorithm>
#include <array>

namespace kvferry {
namespace {

class Lhd final : public Policy {
 public:
  Lhd(Tier tier, const Clock& clock, const ReuseHistory& history)
      : Policy(tier, ReuseHistory::kClasses), clock_(clock), history_(history) {}

  // Walks over the cells from the lowest score on: nodes of a class lie in the order of their last use, so that a
  // cell is a stretch of them. `next_` remembers how far all cells are empty while time stands still.
  Node* victim() override {
    catch_up();
    for (; next_ < kCells; ++next_) {
      const std::size_t cell = cells_[next_], age = cell % ReuseHistory::kAges;
      const auto& nodes = groups_[cell / ReuseHistory::kAges].nodes;
      const std::uint64_t youngest_age = ReuseHistory::begin_of(age);
      if (nodes.empty() || youngest_age > clock_.now || nodes.begin()->order + youngest_age > clock_.now) {
        continue;  // none is so old
      }
      const std::uint64_t end = age + 1 < ReuseHistory::kAges ? ReuseHistory::begin_of(age + 1) : clock_.now + 1;
      if (nodes.rbegin()->order + end <= clock_.now) {
        continue;  // none is so young
      }
      const auto oldest = nodes.begin()->order + end > clock_.now ? nodes.begin()
                                                                  : nodes.lower_bound({clock_.now - end + 1, 0, nullptr});
      if (oldest != nodes.end() && oldest->order + youngest_age <= clock_.now) {
        return oldest->node;
      }
    }
    return nullptr;
  }

  std::pair<std::int64_t, std::uint64_t> rank(const Node* node) const override {
    catch_up();
    return {static_cast<std::int64_t>(places_[cell_of(node)]), node->use.last};
  }

 private:
  static constexpr std::size_t kCells = ReuseHistory::kCells;

  Place place(const Node* node) const override {
    return {static_cast<std::uint8_t>(ReuseHistory::class_of(node->use.uses)), node->use.last};
  }
  void offered(const Node* node) override {
    catch_up();
    next_ = std::min(next_, places_[cell_of(node)]);
  }
  std::size_t cell_of(const Node* node) const {
    return ReuseHistory::class_of(node->use.uses) * ReuseHistory::kAges +
           ReuseHistory::age_of(clock_.now - node->use.last);
  }

  void catch_up() const {
    if (version_ != history_.version()) {
      version_ = history_.version();
      for (std::size_t i = 0; i < kCells; ++i) {
        cells_[i] = static_cast<std::uint8_t>(i);
      }
      // equal scores: the older, the less used first
      std::sort(cells_.begin(), cells_.end(), [this](std::uint8_t a, std::uint8_t b) {
        const double left = history_.score(a), right = history_.score(b);
        const std::size_t age_a = a % ReuseHistory::kAges, age_b = b % ReuseHistory::kAges;
        return left != right ? left < right : age_a != age_b ? age_a > age_b : a < b;
      });
      for (std::size_t i = 0; i < kCells; ++i) {
        places_[cells_[i]] = i;
      }
      next_ = 0;
    }
    if (now_ != clock_.now) {
      now_ = clock_.now;
      next_ = 0;
    }
  }

  const Clock& clock_;
  const ReuseHistory& history_;
  mutable std::array<std::uint8_t, kCells> cells_{};   // by score
  mutable std::array<std::size_t, kCells> places_{};  // of a cell in it
  mutable std::uint64_t version_ = 0, now_ = 0;
  mutable std::size_t next_ = 0;
};

}  // namespace

std::unique_ptr<Policy> make_lhd(Tier tier, const Clock& clock, const ReuseHistory& history) {
  return std::make_unique<Lhd>(tier, clock, history);
}

}  // namespace kvferry
