// L2 pages: app._native.PageExtents.
#include "kvferry/extents.hpp"

#include <string>

#include "arrays.hpp"
#include "bind.hpp"
#include "kvferry/errors.hpp"
#include "page_lists.hpp"

using kvferry::BadInput;
using kvferry::Page;
using kvferry::PageExtents;
using kvferry::Run;
using kvferry::Runs;
namespace bind = kvferry::bind;

namespace {

// PageExtents of one lane with the scratch list that its calls reuse.
struct Extents {
  explicit Extents(std::int64_t pages) : core(pages, 1, "pool") {}

  bool allocate(std::int64_t count) {
    if (count < 1 || count > core.pages()) {
      throw BadInput("cannot allocate " + std::to_string(count) + " pages of " + std::to_string(core.pages()));
    }
    return core.allocate(0, count, runs);
  }

  PageExtents core;
  Runs runs;
};

}  // namespace

void bind_extents(nb::module_& m) {
  nb::class_<Extents>(m, "PageExtents")
      .def(nb::init<std::int64_t>(), nb::arg("pages"))
      .def_prop_ro("pages", [](const Extents& self) { return self.core.pages(); })
      .def_prop_ro("free_pages", [](const Extents& self) { return self.core.free_pages(); })
      .def_prop_ro("reserved_pages", [](const Extents& self) { return self.core.reserved_pages(); })
      .def_prop_ro("largest_extent", [](const Extents& self) { return self.core.largest_extent(); })
      .def_prop_ro("extents", [](const Extents& self) { return self.core.extents(); })
      .def_prop_ro("holders", [](const Extents& self) { return self.core.holders(); })
      .def_prop_ro("free_slots", [](const Extents& self) { return bind::page_array(self.core.free_slots()); })
      .def_prop_ro("free_extents", [](const Extents& self) { return bind::run_arrays(self.core.free_extents()); })
      .def_prop_ro("_states", [](nb::handle self) {
        return bind::view_of_bytes(nb::cast<Extents&>(self).core.states(), self);
      })
      .def("allocate",
           [](Extents& self, std::int64_t count) {
             return self.allocate(count) ? bind::page_array(self.runs) : nb::none();
           },
           nb::arg("count"))
      .def("allocate_runs",
           [](Extents& self, std::int64_t count) -> nb::object {
             return self.allocate(count) ? bind::run_arrays(self.runs) : nb::none();
           },
           nb::arg("count"))
      .def("release",
           [](Extents& self, nb::handle pages) { self.core.release(bind::int64s(pages, "page numbers").values); },
           nb::arg("pages"))
      .def("release_runs",
           [](Extents& self, nb::handle first, nb::handle count) {
             self.core.release_runs(bind::int64s(first, "first pages").values, bind::int64s(count, "counts").values);
           },
           nb::arg("first"), nb::arg("count"))
      .def("reserve",
           [](Extents& self, std::int64_t holder, std::int64_t count) -> nb::object {
             if (!self.allocate(count)) {
               return nb::none();
             }
             self.core.reserve(holder, self.runs);
             return bind::page_array(self.runs);
           },
           nb::arg("holder"), nb::arg("count"))
      .def("reserved",
           [](const Extents& self, std::int64_t holder) { return bind::page_array(self.core.reserved(holder)); },
           nb::arg("holder"))
      .def("commit", [](Extents& self, std::int64_t holder) { return self.core.commit(holder); }, nb::arg("holder"))
      .def("roll_back", [](Extents& self, std::int64_t holder) { return self.core.roll_back(holder); },
           nb::arg("holder"))
      .def("check_integrity", [](const Extents& self) { self.core.check_integrity(); });
}
