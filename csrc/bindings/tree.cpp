// The prefix tree. Arrays are read in place; arrays in results are copies.
#include "tree_calls.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>

namespace {

using namespace kvferry;
using namespace kvferry::bind;
using namespace nb::literals;

Tier tier_of(int tier) {
  if (tier != 1 && tier != 2) {
    throw BadInput("tier " + std::to_string(tier) + " is none: there are 1 and 2");
  }
  return tier == 1 ? Tier::l1 : Tier::l2;
}

}  // namespace

void bind_tree(nb::module_& m) {
  nb::enum_<Draft>(m, "Draft")
      .value("NONE", Draft::none)
      .value("RECOMPUTE_LAST_PAGE", Draft::recompute_last_page)
      .value("ONE_TOKEN_FURTHER", Draft::one_token_further);
  nb::list transitions;
  for (const Transition& t : kTransitions) {
    transitions.append(nb::make_tuple(std::string(name(t.from)), std::string(name(t.event)), std::string(name(t.to))));
  }
  m.attr("TRANSITIONS") = nb::tuple(transitions);
  nb::list policies;
  for (std::string_view policy : kPolicies) {
    policies.append(std::string(policy));
  }
  m.attr("POLICIES") = nb::tuple(policies);

  nb::class_<Namespace>(m, "Namespace")
      .def(
          "__init__",
          [](Namespace* self, std::string fingerprint, std::optional<std::string> salt,
             std::optional<std::string> adapter, bool bigrams) {
            const std::optional<std::string> parts[] = {std::move(fingerprint), std::move(salt), std::move(adapter)};
            new (self) Namespace(parts, bigrams);
          },
          "fingerprint"_a, "salt"_a.none() = nb::none(), "adapter"_a.none() = nb::none(), nb::kw_only(),
          "bigrams"_a = false)
      .def_ro("bigrams", &Namespace::bigrams)
      .def_prop_ro("key", [](const Namespace& n) { return nb::bytes(n.key.data(), n.key.size()); });
  m.def(
      "page_keys",
      [](const Namespace& space, const AnyArray& tokens, std::size_t page_size) {
        return to_numpy(page_keys(space, tokens_of(tokens), page_size));
      },
      "space"_a, "tokens"_a.noconvert(), "page_size"_a);
  bind_tree_results(m);

  nb::class_<SharedTree> tree(m, "PrefixTree");
  tree.def(
          "__init__",
          [](SharedTree* self, std::size_t page_size, std::int64_t l1_pages, std::int64_t l2_pages, int lanes,
             int hash_bits, const std::string& policy, const std::optional<std::string>& l2_policy) {
            new (self) SharedTree(TreeShape{
                page_size, l1_pages, l2_pages, lanes, hash_bits, {policy, l2_policy.value_or(policy)}});
          },
          nb::kw_only(), "page_size"_a, "l1_pages"_a, "l2_pages"_a = 0, "lanes"_a = 1, "hash_bits"_a = 64,
          "policy"_a = "lhd", "l2_policy"_a.none() = nb::none())
      .def_prop_ro("page_size", [](const SharedTree& self) { return self.tree.shape().page_size; })
      .def_prop_ro("lanes", [](const SharedTree& self) { return self.tree.shape().lanes; })
      .def(
          "match",
          [](SharedTree& self, const Namespace& space, const AnyArray& tokens, bool floor, Draft draft, bool touch,
             bool pin) {
            const Tokens t = tokens_of(tokens);
            return locked(self, t.size >= kLongTokens, [&](PrefixTree& tree) {
              return tree.match(space, t, {floor, draft, touch, pin});
            });
          },
          "space"_a, "tokens"_a.noconvert(), "floor"_a = false, "draft"_a = Draft::none, "touch"_a = true,
          "pin"_a = false)
      .def(
          "insert",
          [](SharedTree& self, const Namespace& space, const AnyArray& tokens, nb::handle pages,
             nb::handle owners, bool pin) {
            const Tokens t = tokens_of(tokens);
            const auto page_list = int64s(pages, "pages");
            const auto owner_list = owners_of(owners);
            return locked(self, t.size >= kLongTokens, [&](PrefixTree& tree) {
              return tree.insert(space, t, page_list.values, owner_list.values, pin);
            });
          },
          "space"_a, "tokens"_a.noconvert(), "pages"_a, "owners"_a.none() = nb::none(), "pin"_a = false)
      .def(
          "pin",
          [](SharedTree& self, std::int64_t node) { locked(self, false, [&](PrefixTree& t) { t.pin(node); }); },
          "node"_a)
      .def(
          "unpin",
          [](SharedTree& self, std::int64_t node) { locked(self, false, [&](PrefixTree& t) { t.unpin(node); }); },
          "node"_a)
      .def(
          "split",
          [](SharedTree& self, std::int64_t node, std::int64_t tokens) {
            return locked(self, false, [&](PrefixTree& t) { return t.split(node, tokens); });
          },
          "node"_a, "tokens"_a)
      .def(
          "evict",
          [](SharedTree& self, int tier, std::int64_t pages) {
            const Tier from = tier_of(tier);
            return to_array(locked(self, pages >= kLongPages, [&](PrefixTree& t) { return t.evict(from, pages); }));
          },
          "tier"_a, "pages"_a)
      .def(
          "evict_owners",
          [](SharedTree& self, int tier, nb::handle wanted) {
            const Tier from = tier_of(tier);
            const auto lanes = int64s(wanted, "pages by lane");
            return to_array(locked(self, true, [&](PrefixTree& t) { return t.evict_owners(from, lanes.values); }));
          },
          "tier"_a, "wanted"_a)
      .def(
          "victims",
          [](SharedTree& self, int tier, nb::handle wanted) {
            const Tier from = tier_of(tier);
            const auto lanes = int64s(wanted, "pages by lane");
            return locked(self, true, [&](PrefixTree& t) { return t.victims(from, lanes.values); });
          },
          "tier"_a, "wanted"_a)
      .def(
          "clear",
          [](SharedTree& self, const Namespace& space) {
            return locked(self, true, [&](PrefixTree& t) { return t.clear(space); });
          },
          "space"_a)
      .def(
          "node",
          [](SharedTree& self, std::int64_t id) {
            return locked(self, false, [&](PrefixTree& t) { return t.node(id); });
          },
          "node_id"_a)
      .def(
          "path",
          [](SharedTree& self, std::int64_t id) {
            return locked(self, false, [&](PrefixTree& t) { return t.path(id); });
          },
          "node_id"_a)
      .def("stats", [](SharedTree& self) { return locked(self, false, [](PrefixTree& t) { return t.stats(); }); })
      .def("check_integrity",
           [](SharedTree& self) { locked(self, true, [](PrefixTree& t) { t.check_integrity(); }); });
  bind_tree_tickets(tree);
}
