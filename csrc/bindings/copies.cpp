#include "kvferry/copies.hpp"

#include "bind.hpp"
#include "pools.hpp"

void bind_copies(nb::module_& m) {
  using namespace kvferry;
  using namespace kvferry::bind;
  m.def(
      "copy_pages",
      [](const Bytes<const std::uint8_t, 2>& source, const Int64s& pages, const Bytes<std::uint8_t, 2>& destination,
         const Int64s& to, unsigned threads) {
        const auto from = pool_of<2, const std::byte>(source);
        const auto into = pool_of<2, std::byte>(destination);
        nb::gil_scoped_release release;
        copy_pages(from, view(pages), into, view(to), threads);
      },
      nb::arg("source").noconvert(), nb::arg("pages").noconvert(), nb::arg("destination").noconvert(),
      nb::arg("to").noconvert(), nb::kw_only(), nb::arg("threads") = 0,
      "Copy page pages[i] of a layer to page to[i] of another; both are uint8 [pages, item_bytes].");
  m.attr("STREAMING_BYTES") = streaming_bytes();
}
