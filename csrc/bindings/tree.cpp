// The prefix tree. Arrays are read in place; arrays in results are copies.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <span>
#include <string>

#include "arrays.hpp"
#include "bind.hpp"
#include "kvferry/errors.hpp"
#include "kvferry/tree.hpp"

namespace {

using namespace kvferry;
using namespace kvferry::bind;
using namespace nb::literals;

using AnyArray = nb::ndarray<nb::ro, nb::device::cpu>;

Tokens tokens_of(const AnyArray& array) {
  if (array.ndim() != 1) {
    throw BadInput("tokens have one dimension, not " + std::to_string(array.ndim()));
  }
  if (array.size() > 1 && array.stride(0) != 1) {
    throw BadInput("tokens are contiguous, not " + std::to_string(array.stride(0)) + " apart");
  }
  if (array.dtype() == nb::dtype<std::int64_t>()) {
    return Tokens(std::span(static_cast<const std::int64_t*>(array.data()), array.size()));
  }
  if (array.dtype() == nb::dtype<std::int32_t>()) {
    return Tokens(std::span(static_cast<const std::int32_t*>(array.data()), array.size()));
  }
  throw BadInput("tokens are int64 or int32, not another type");
}

// None: every page is of lane 0.
Input<std::int8_t> owners_of(nb::handle owners) {
  return owners.is_none() ? Input<std::int8_t>{} : int8s(owners, "owners");
}

nb::object to_array(std::span<const std::int64_t> values) {
  std::int64_t* data = nullptr;
  nb::object array = new_int64s(values.size(), data);
  std::copy(values.begin(), values.end(), data);
  return array;
}

// The tree with its lock: long calls run without the GIL, and then another thread may come.
struct SharedTree {
  explicit SharedTree(const TreeShape& shape) : tree(shape) {}
  PrefixTree tree;
  std::mutex mutex;
};

// Below this many tokens a call is shorter than what it may cost to get the GIL back.
constexpr std::size_t kLongTokens = 8192;
constexpr std::int64_t kLongPages = 1024;

template <typename Work>
auto locked(SharedTree& shared, bool is_long, Work&& work) {
  std::optional<nb::gil_scoped_release> release;
  if (is_long) {
    release.emplace();
  }
  const std::lock_guard lock(shared.mutex);  // let go of before the GIL is asked for: no deadlock
  return work(shared.tree);
}

template <typename Owner, std::vector<std::int64_t> Owner::* field>
nb::object array_of(const Owner& self) {
  return to_array(self.*field);
}

void bind_results(nb::module_& m) {
  nb::class_<Match>(m, "Match")
      .def_ro("tokens", &Match::tokens)
      .def_ro("l1_tokens", &Match::l1_tokens)
      .def_prop_ro("l2_tokens", [](const Match& r) { return r.tokens - r.l1_tokens; })
      .def_ro("known_tokens", &Match::known_tokens)
      .def_ro("node", &Match::node)
      .def_prop_ro("pages", &array_of<Match, &Match::pages>);
  nb::class_<Inserted>(m, "Inserted")
      .def_ro("node", &Inserted::node)
      .def_ro("tokens", &Inserted::tokens)
      .def_ro("known_tokens", &Inserted::known_tokens)
      .def_prop_ro("duplicates", &array_of<Inserted, &Inserted::duplicates>)
      .def_prop_ro("freed_l2", &array_of<Inserted, &Inserted::freed_l2>);
  nb::class_<Reserved>(m, "Reserved").def_ro("node", &Reserved::node).def_ro("ticket", &Reserved::ticket);
  nb::class_<Settled>(m, "Settled")
      .def_ro("nodes", &Settled::nodes)
      .def_prop_ro("pages", &array_of<Settled, &Settled::pages>);
  nb::class_<Freed>(m, "Freed")
      .def_prop_ro("l1", &array_of<Freed, &Freed::l1>)
      .def_prop_ro("l2", &array_of<Freed, &Freed::l2>);
  nb::class_<NodeInfo>(m, "NodeInfo")
      .def_ro("id", &NodeInfo::id)
      .def_ro("parent", &NodeInfo::parent)
      .def_ro("start", &NodeInfo::start)
      .def_ro("tokens", &NodeInfo::tokens)
      .def_prop_ro("state", [](const NodeInfo& n) { return std::string(name(n.state)); })
      .def_prop_ro("l1_pages", &array_of<NodeInfo, &NodeInfo::l1_pages>)
      .def_prop_ro("l2_pages", &array_of<NodeInfo, &NodeInfo::l2_pages>)
      .def_prop_ro("owners", [](const NodeInfo& n) { return nb::cast(to_numpy(std::vector<std::int8_t>(n.owners))); })
      .def_ro("pins", &NodeInfo::pins)
      .def_ro("holds", &NodeInfo::holds)
      .def_ro("ticket", &NodeInfo::ticket);
  nb::class_<TreeStats>(m, "TreeStats")
      .def_ro("nodes", &TreeStats::nodes)
      .def_ro("namespaces", &TreeStats::namespaces)
      .def_ro("tickets", &TreeStats::tickets)
      .def_ro("pins", &TreeStats::pins)
      .def_ro("l1_pages", &TreeStats::l1_pages)
      .def_ro("l2_pages", &TreeStats::l2_pages)
      .def_ro("evictable_l1_pages", &TreeStats::evictable_l1_pages)
      .def_ro("evictable_l2_pages", &TreeStats::evictable_l2_pages);
}

Tier tier_of(int tier) {
  if (tier != 1 && tier != 2) {
    throw BadInput("tier " + std::to_string(tier) + " is none: there are 1 and 2");
  }
  return tier == 1 ? Tier::l1 : Tier::l2;
}

void bind_copies_in_flight(nb::class_<SharedTree>& tree) {
  tree.def(
          "reserve",
          [](SharedTree& self, const Namespace& space, const AnyArray& tokens, std::int64_t first_page,
             nb::handle l2_pages, nb::handle owners, int acks) {
            const Tokens t = tokens_of(tokens);
            const auto pages = int64s(l2_pages, "pages");
            const auto lanes = owners_of(owners);
            return locked(self, t.size >= kLongTokens, [&](PrefixTree& tree) {
              return tree.reserve(space, t, first_page, pages.values, lanes.values, acks);
            });
          },
          "space"_a, "tokens"_a.noconvert(), "first_page"_a, "l2_pages"_a, "owners"_a.none() = nb::none(),
          nb::kw_only(), "acks"_a = 1)
      .def(
          "begin_backup",
          [](SharedTree& self, std::int64_t node, nb::handle l2_pages, int acks) {
            const auto pages = int64s(l2_pages, "pages");
            return locked(self, false, [&](PrefixTree& t) { return t.begin_backup(node, pages.values, acks); });
          },
          "node"_a, "l2_pages"_a, nb::kw_only(), "acks"_a = 1)
      .def(
          "load_owners",
          [](SharedTree& self, std::int64_t node) {
            return to_numpy(locked(self, false, [&](PrefixTree& t) { return t.load_owners(node); }));
          },
          "node"_a)
      .def(
          "load_pages",
          [](SharedTree& self, std::int64_t node) {
            return to_array(locked(self, false, [&](PrefixTree& t) { return t.load_pages(node); }));
          },
          "node"_a)
      .def(
          "begin_load",
          [](SharedTree& self, std::int64_t node, nb::handle l1_pages, int acks) {
            const auto pages = int64s(l1_pages, "pages");
            return locked(self, false, [&](PrefixTree& t) { return t.begin_load(node, pages.values, acks); });
          },
          "node"_a, "l1_pages"_a, nb::kw_only(), "acks"_a = 1)
      .def(
          "acknowledge",
          [](SharedTree& self, std::int64_t ticket) {
            return locked(self, false, [&](PrefixTree& t) { return t.acknowledge(ticket); });
          },
          "ticket"_a)
      .def(
          "cancel",
          [](SharedTree& self, std::int64_t ticket) {
            return locked(self, false, [&](PrefixTree& t) { return t.cancel(ticket); });
          },
          "ticket"_a);
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
  bind_results(m);

  nb::class_<SharedTree> tree(m, "PrefixTree");
  tree.def(
          "__init__",
          [](SharedTree* self, std::size_t page_size, std::int64_t l1_pages, std::int64_t l2_pages, int lanes,
             int hash_bits) {
            new (self) SharedTree(TreeShape{page_size, l1_pages, l2_pages, lanes, hash_bits});
          },
          nb::kw_only(), "page_size"_a, "l1_pages"_a, "l2_pages"_a = 0, "lanes"_a = 1, "hash_bits"_a = 64)
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
  bind_copies_in_flight(tree);
}
