#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#include "arrays.hpp"

#include <numpy/arrayobject.h>

#include <string>

#include "kvferry/errors.hpp"

namespace kvferry::bind {

namespace {

PyArrayObject* as_array(nb::handle object) { return reinterpret_cast<PyArrayObject*>(object.ptr()); }

template <typename T>
Input<T> input(nb::handle object, int type, const char* what) {
  nb::object keep = nb::borrow(object);
  bool ready = PyArray_Check(object.ptr()) && PyArray_TYPE(as_array(object)) == type &&
               PyArray_CHKFLAGS(as_array(object), NPY_ARRAY_CARRAY_RO);
  if (!ready) {
    keep = nb::steal(PyArray_FROM_O(object.ptr()));
    if (!keep.is_valid()) {
      throw nb::python_error();
    }
    // an empty list has no type of its own
    int flags = NPY_ARRAY_CARRAY_RO;
    if (PyArray_SIZE(as_array(keep)) == 0) {
      flags |= NPY_ARRAY_FORCECAST;
    } else if (!PyTypeNum_ISINTEGER(PyArray_TYPE(as_array(keep)))) {
      nb::str dtype(nb::handle(reinterpret_cast<PyObject*>(PyArray_DESCR(as_array(keep)))));
      throw BadInput(std::string(what) + " are whole numbers, not " + dtype.c_str());
    }
    nb::object converted = nb::steal(PyArray_FROMANY(keep.ptr(), type, 0, 0, flags));
    if (!converted.is_valid()) {
      PyErr_Clear();
      nb::str dtype(nb::handle(reinterpret_cast<PyObject*>(PyArray_DESCR(as_array(keep)))));
      throw BadInput(std::string(what) + " of type " + dtype.c_str() + " may not fit int" +
                     std::to_string(8 * sizeof(T)));
    }
    keep = std::move(converted);
  }
  if (PyArray_NDIM(as_array(keep)) != 1) {
    throw BadInput(std::string(what) + " have one dimension, not " + std::to_string(PyArray_NDIM(as_array(keep))));
  }
  std::span<const T> values(static_cast<const T*>(PyArray_DATA(as_array(keep))),
                            static_cast<std::size_t>(PyArray_DIM(as_array(keep), 0)));
  return {std::move(keep), values};
}

bool load() {
  import_array1(false);
  return true;
}

}  // namespace

void import_numpy() {
  if (!load()) {
    throw nb::python_error();
  }
}

Input<std::int64_t> int64s(nb::handle object, const char* what) { return input<std::int64_t>(object, NPY_INT64, what); }

Input<std::int8_t> int8s(nb::handle object, const char* what) {
  if (PyArray_Check(object.ptr()) && PyArray_TYPE(as_array(object)) == NPY_INT8) {
    return input<std::int8_t>(object, NPY_INT8, what);
  }
  // Anything wider, a list among it, goes through int64, so that a number that does not fit can be named.
  Input<std::int64_t> wide = int64s(object, what);
  for (std::int64_t value : wide.values) {
    if (value != static_cast<std::int8_t>(value)) {
      throw BadInput(std::string(what) + " fit int8, " + std::to_string(value) + " does not");
    }
  }
  nb::object narrow =
      nb::steal(PyArray_FROMANY(wide.keep.ptr(), NPY_INT8, 1, 1, NPY_ARRAY_CARRAY_RO | NPY_ARRAY_FORCECAST));
  if (!narrow.is_valid()) {
    throw nb::python_error();
  }
  return input<std::int8_t>(narrow, NPY_INT8, what);
}

nb::object new_int64s(std::size_t size, std::int64_t*& data) {
  npy_intp length = static_cast<npy_intp>(size);
  nb::object array = nb::steal(PyArray_SimpleNew(1, &length, NPY_INT64));
  if (!array.is_valid()) {
    throw nb::python_error();
  }
  data = static_cast<std::int64_t*>(PyArray_DATA(as_array(array)));
  return array;
}

nb::object view_of_bytes(std::span<std::uint8_t> bytes, nb::handle owner) {
  npy_intp length = static_cast<npy_intp>(bytes.size());
  nb::object array = nb::steal(PyArray_SimpleNewFromData(1, &length, NPY_UINT8, bytes.data()));
  if (!array.is_valid() || PyArray_SetBaseObject(as_array(array), owner.inc_ref().ptr()) != 0) {
    throw nb::python_error();
  }
  return array;
}

}  // namespace kvferry::bind
