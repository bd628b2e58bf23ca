// Digests of page items: digest_items of app._native.
#include "kvferry/digests.hpp"

#include <vector>

#include "arrays.hpp"
#include "bind.hpp"
#include "pools.hpp"

void bind_digests(nb::module_& m) {
  using namespace kvferry;
  using namespace kvferry::bind;
  m.def(
      "digest_items",
      [](const Bytes<const std::uint8_t, 3>& pool, nb::handle layers, nb::handle pages, unsigned threads) {
        const auto items = pool_of<3, const std::byte>(pool);
        const auto of_layers = int64s(layers, "layers");
        const auto of_pages = int64s(pages, "page numbers");
        std::vector<std::uint64_t> digests(of_pages.values.size());
        {
          nb::gil_scoped_release release;
          digest_items(items, of_layers.values, of_pages.values, digests.data(), threads);
        }
        return to_numpy(std::move(digests));
      },
      nb::arg("pool").noconvert(), nb::arg("layers"), nb::arg("pages"), nb::kw_only(), nb::arg("threads") = 0,
      "xxh3 (64 bits) of item (layers[i], pages[i]) of a pool, uint8 [layers, pages, item_bytes].");
}
