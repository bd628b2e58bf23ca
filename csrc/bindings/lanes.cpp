// L1 pages: app._native.PageLane (one lane) and OwnerLanes (the lanes of all ranks).
#include <string>

#include "arrays.hpp"
#include "bind.hpp"
#include "kvferry/errors.hpp"
#include "kvferry/extents.hpp"
#include "page_lists.hpp"

using kvferry::BadInput;
using kvferry::Page;
using kvferry::PageExtents;
using kvferry::Runs;
namespace bind = kvferry::bind;

namespace {

struct Lane {
  explicit Lane(std::int64_t pages) : core(pages, 1, "lane", PageExtents::Tail::kLargest) {}

  PageExtents core;
  Runs runs;
};

struct Lanes {
  Lanes(std::int64_t lanes, std::int64_t pages) : core(pages, lanes, "set of lanes") {}

  std::size_t lane(std::int64_t number) const {
    if (number < 0 || number >= core.lanes()) {
      throw BadInput("lane " + std::to_string(number) + " is outside 0.." + std::to_string(core.lanes()));
    }
    return static_cast<std::size_t>(number);
  }

  // None when a lane has too few.
  nb::object allocate(nb::handle owners) {
    auto input = bind::int8s(owners, "owners");
    if (input.values.empty()) {
      throw BadInput("cannot allocate 0 pages");
    }
    Page* pages = nullptr;
    nb::object array = bind::new_int64s(input.values.size(), pages);
    return core.allocate_owned(input.values, pages) ? array : nb::none();
  }

  PageExtents core;
};

}  // namespace

void bind_lanes(nb::module_& m) {
  nb::class_<Lane>(m, "PageLane")
      .def(nb::init<std::int64_t>(), nb::arg("pages"))
      .def_prop_ro("pages", [](const Lane& self) { return self.core.pages(); })
      .def_prop_ro("free_pages", [](const Lane& self) { return self.core.free_pages(); })
      .def_prop_ro("largest_extent", [](const Lane& self) { return self.core.largest_extent(); })
      .def_prop_ro("_taken", [](nb::handle self) {
        return bind::view_of_bytes(nb::cast<Lane&>(self).core.states(), self);
      })
      .def("allocate",
           [](Lane& self, std::int64_t count) {
             return self.core.allocate(0, count, self.runs) ? bind::page_array(self.runs) : nb::none();
           },
           nb::arg("count"))
      .def("release",
           [](Lane& self, nb::handle pages) { self.core.release(bind::int64s(pages, "page numbers").values); },
           nb::arg("pages"))
      .def("check_integrity", [](const Lane& self) { self.core.check_integrity(); });

  nb::class_<Lanes>(m, "OwnerLanes")
      .def(nb::init<std::int64_t, std::int64_t>(), nb::arg("lanes"), nb::arg("pages"))
      .def_prop_ro("lanes", [](const Lanes& self) { return self.core.lanes(); })
      .def_prop_ro("pages", [](const Lanes& self) { return self.core.pages_per_lane(); })
      .def_prop_ro("free_pages", [](const Lanes& self) { return self.core.free_pages(); })
      .def_prop_ro("reserved_pages", [](const Lanes& self) { return self.core.reserved_pages(); })
      .def_prop_ro("holders", [](const Lanes& self) { return self.core.holders(); })
      .def_prop_ro("_states", [](nb::handle self) {
        return bind::view_of_bytes(nb::cast<Lanes&>(self).core.states(), self);
      })
      .def("free_in", [](const Lanes& self, std::int64_t lane) { return self.core.free_pages(self.lane(lane)); },
           nb::arg("lane"))
      .def("largest_extent",
           [](const Lanes& self, std::int64_t lane) { return self.core.largest_extent(self.lane(lane)); },
           nb::arg("lane"))
      .def("deficits",
           [](const Lanes& self, nb::handle owners) {
             return bind::page_array(self.core.deficits(bind::int8s(owners, "owners").values));
           },
           nb::arg("owners"))
      .def("alloc_pages_with_owners", [](Lanes& self, nb::handle owners) { return self.allocate(owners); },
           nb::arg("owners"))
      .def("release",
           [](Lanes& self, nb::handle pages) { self.core.release(bind::int64s(pages, "page numbers").values); },
           nb::arg("pages"))
      .def("reserve",
           [](Lanes& self, std::int64_t holder, nb::handle owners) {
             nb::object pages = self.allocate(owners);
             if (!pages.is_none()) {
               self.core.reserve(holder, bind::int64s(pages, "page numbers").values);
             }
             return pages;
           },
           nb::arg("holder"), nb::arg("owners"))
      .def("reserved",
           [](const Lanes& self, std::int64_t holder) { return bind::page_array(self.core.reserved(holder)); },
           nb::arg("holder"))
      .def("commit", [](Lanes& self, std::int64_t holder) { return self.core.commit(holder); }, nb::arg("holder"))
      .def("roll_back", [](Lanes& self, std::int64_t holder) { return self.core.roll_back(holder); }, nb::arg("holder"))
      .def("check_integrity", [](const Lanes& self) { self.core.check_integrity(); });
}
