// The extension module app._native.
#include <exception>

#include "arrays.hpp"
#include "bind.hpp"
#include "kvferry/errors.hpp"

namespace {

void raise(const char* name, const char* what) {
  nb::object type = nb::module_::import_("app.errors").attr(name);
  PyErr_SetString(type.ptr(), what);
}

void translate(const std::exception_ptr& p, void*) {
  try {
    std::rethrow_exception(p);
  } catch (const kvferry::PageMismatch& e) {
    raise("PageMismatch", e.what());
  } catch (const kvferry::BadInput& e) {
    raise("BadInput", e.what());
  } catch (const kvferry::IntegrityError& e) {
    raise("IntegrityError", e.what());
  }
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "The native core of kvferry: allocators, page plans, prefix tree, page copies and digests.";
  kvferry::bind::import_numpy();
  nb::register_exception_translator(translate);
  bind_extents(m);
  bind_lanes(m);
  bind_plans(m);
  bind_tree(m);
  bind_copies(m);
  bind_digests(m);
}
