// What the prefix tree answers. Arrays are copies.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "tree_calls.hpp"

namespace kvferry::bind {
namespace {

template <typename Owner, std::vector<std::int64_t> Owner::* field>
nb::object array_of(const Owner& self) {
  return to_array(self.*field);
}

}  // namespace

void bind_tree_results(nb::module_& m) {
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

}  // namespace kvferry::bind
