// Page plans: coalesce, owned_by, pages_of_groups, slots_of_pages and plan_addresses of app._native.
#include "kvferry/plans.hpp"

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <limits>
#include <string>
#include <tuple>

#include "arrays.hpp"
#include "bind.hpp"
#include "kvferry/errors.hpp"

using kvferry::BadInput;
using kvferry::PageMismatch;
namespace bind = kvferry::bind;

namespace {

constexpr const char* kPages = "page numbers";

nb::object coalesce(nb::handle source, nb::handle destination) {
  auto from = bind::int64s(source, kPages);
  auto to = bind::int64s(destination, kPages);
  auto breaks = kvferry::find_breaks(from.values, to.values);
  std::int64_t *first = nullptr, *second = nullptr, *count = nullptr;
  nb::object firsts = bind::new_int64s(breaks.count, first);
  nb::object seconds = bind::new_int64s(breaks.count, second);
  nb::object counts = bind::new_int64s(breaks.count, count);
  kvferry::write_runs(breaks, from.values, to.values, first, second, count);
  return nb::make_tuple(std::move(firsts), std::move(seconds), std::move(counts));
}

nb::object owned_by(nb::handle pages, nb::handle owners, std::int64_t owner, std::int64_t first_position) {
  auto all = bind::int64s(pages, kPages);
  auto of = bind::int8s(owners, "owners");
  if (all.values.size() != of.values.size()) {
    throw PageMismatch(std::to_string(all.values.size()) + " pages have " + std::to_string(of.values.size()) +
                       " owners");
  }
  if (owner < 0 || owner > std::numeric_limits<std::int8_t>::max()) {
    throw BadInput("owner " + std::to_string(owner) + " is outside 0..128");
  }
  if (first_position < 0) {
    throw BadInput("negative position: " + std::to_string(first_position));
  }
  if (first_position > std::numeric_limits<std::int64_t>::max() - static_cast<std::int64_t>(all.values.size())) {
    throw BadInput("position " + std::to_string(first_position) + " leaves no room for the pages behind it");
  }
  auto marks = kvferry::find_owned(of.values, static_cast<std::int8_t>(owner));
  std::int64_t *page = nullptr, *position = nullptr;
  nb::object owned = bind::new_int64s(marks.count, page);
  nb::object positions = bind::new_int64s(marks.count, position);
  kvferry::write_owned(marks, all.values, first_position, page, position);
  return nb::make_tuple(std::move(owned), std::move(positions));
}

nb::object pages_of_groups(nb::handle tokens, std::int64_t page_size, std::int64_t pages) {
  auto input = bind::int64s(tokens, "token indices");
  std::int64_t* out = nullptr;
  std::size_t size = page_size > 0 ? input.values.size() / static_cast<std::size_t>(page_size) : 0;
  nb::object result = bind::new_int64s(size, out);
  kvferry::write_pages_of_groups(input.values, page_size, pages, out);
  return result;
}

nb::object slots_of_pages(nb::handle pages, std::int64_t page_size, std::int64_t tokens) {
  auto input = bind::int64s(pages, kPages);
  kvferry::require_tokens_fill(input.values.size(), page_size, tokens);
  for (std::int64_t page : input.values) {
    if (page < 0 || page >= std::numeric_limits<std::int64_t>::max() / page_size) {
      throw BadInput("page " + std::to_string(page) + " has no token indices");
    }
  }
  std::int64_t* out = nullptr;
  nb::object result = bind::new_int64s(static_cast<std::size_t>(tokens), out);
  kvferry::write_slots(input.values, page_size, tokens, out);
  return result;
}

// (name, source base, destination base, item bytes, source pages, destination pages)
using PyTerm = std::tuple<nb::object, std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t>;

nb::object plan_addresses(const std::vector<PyTerm>& named, nb::handle source, nb::handle destination,
                          nb::handle count) {
  auto from_page = bind::int64s(source, kPages);
  auto to_page = bind::int64s(destination, kPages);
  auto counts = bind::int64s(count, "counts");
  std::vector<kvferry::Term> terms;
  terms.reserve(named.size());
  for (const auto& [name, ours, theirs, item_bytes, our_pages, their_pages] : named) {
    terms.push_back({ours, theirs, item_bytes, our_pages, their_pages});
  }
  std::size_t size = terms.size() * counts.values.size();
  std::int64_t *from = nullptr, *to = nullptr, *length = nullptr;
  nb::object sources = bind::new_int64s(size, from);
  nb::object destinations = bind::new_int64s(size, to);
  nb::object lengths = bind::new_int64s(size, length);
  if (auto stray = kvferry::write_addresses(terms, from_page.values, to_page.values, counts.values, from, to, length)) {
    nb::str name(std::get<0>(named[stray->term]));
    throw PageMismatch("page " + std::to_string(stray->page) + " of " + name.c_str() + " is not of " +
                       std::to_string(stray->pages));
  }
  return nb::make_tuple(std::move(sources), std::move(destinations), std::move(lengths));
}

}  // namespace

void bind_plans(nb::module_& m) {
  m.def("coalesce", &coalesce, nb::arg("source"), nb::arg("destination"));
  m.def("owned_by", &owned_by, nb::arg("pages"), nb::arg("owners"), nb::arg("owner"), nb::arg("first_position"));
  m.def("pages_of_groups", &pages_of_groups, nb::arg("tokens"), nb::arg("page_size"), nb::arg("pages"));
  m.def("slots_of_pages", &slots_of_pages, nb::arg("pages"), nb::arg("page_size"), nb::arg("tokens"));
  m.def("plan_addresses", &plan_addresses, nb::arg("terms"), nb::arg("source"), nb::arg("destination"),
        nb::arg("count"));
}
