// Copies in flight between the tiers.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "tree_calls.hpp"

namespace kvferry::bind {

using namespace nb::literals;

void bind_tree_tickets(nb::class_<SharedTree>& tree) {
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

}  // namespace kvferry::bind
