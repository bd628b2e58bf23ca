"""Which layouts, copy backends and storages go together."""

from __future__ import annotations

import itertools

import pytest

from app.core.pairings import BACKENDS, LAYOUTS, require_pairing
from app.errors import SettingsError

WORKS = {
    ("layer_first", "direct"),
    ("layer_first", "kernel"),
    ("page_first", "kernel"),
    ("page_first_direct", "direct"),
    ("page_first_direct", "kernel"),
    ("layer_page_first", "direct"),
}


@pytest.mark.contract(13)
@pytest.mark.parametrize(("layout", "backend"), list(itertools.product(LAYOUTS, BACKENDS)))
def test_a_pairing_works_or_stops_the_start(layout: str, backend: str) -> None:
    """Every layout with every backend is either accepted or refused with both keys and values in the message."""
    if (layout, backend) in WORKS:
        assert require_pairing(layout=layout, copy_backend=backend) == (layout, backend, "none")
        return
    with pytest.raises(SettingsError) as caught:
        require_pairing(layout=layout, copy_backend=backend)
    assert f"hicache.copy_backend ({backend})" in caught.value.message
    assert f"hicache.layout ({layout})" in caught.value.message


@pytest.mark.contract(61)
def test_layer_page_first_takes_the_direct_backend_and_no_storage() -> None:
    """layer_page_first starts with the direct backend alone; the kernel one and a storage stop the start."""
    assert require_pairing(layout="layer_page_first", copy_backend="direct")
    with pytest.raises(
        SettingsError, match=r"hicache\.copy_backend \(kernel\).*layer_page_first.*takes direct"
    ):
        require_pairing(layout="layer_page_first", copy_backend="kernel")
    with pytest.raises(
        SettingsError, match=r"hicache\.storage \(file\).*hicache\.layout \(layer_page_first\)"
    ):
        require_pairing(layout="layer_page_first", copy_backend="direct", storage="file")


@pytest.mark.contract(61)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "layer_page_first"])
def test_the_other_layouts_go_with_the_kernel_backend_and_storage(layout: str) -> None:
    """The three other layouts work with the kernel backend, also beside a storage."""
    accepted = require_pairing(layout=layout, copy_backend="kernel", storage="file")
    assert accepted == (layout, "kernel", "file")


@pytest.mark.contract(12)
@pytest.mark.parametrize("layout", ["layer_first", "page_first_direct"])
def test_shared_kv_has_no_storage(layout: str) -> None:
    """Shared KV together with a storage stops the start and names the setting; either alone does not."""
    with pytest.raises(SettingsError, match=r"hicache\.storage \(file\).*shared KV"):
        require_pairing(layout=layout, copy_backend="direct", storage="file", shared_kv=True)
    assert require_pairing(layout=layout, copy_backend="direct", storage="file", shared_kv=False)
    assert require_pairing(layout=layout, copy_backend="direct", storage="none", shared_kv=True)


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("hicache.layout", {"layout": "token_first"}),
        ("hicache.copy_backend", {"copy_backend": "rdma"}),
        ("hicache.storage", {"storage": "tape"}),
    ],
)
def test_unknown_names_are_listed(key: str, names: dict[str, str]) -> None:
    """A name that does not exist is refused with its key, its value and what there is."""
    with pytest.raises(SettingsError) as caught:
        require_pairing(**({"layout": "layer_first", "copy_backend": "direct"} | names))  # type: ignore[arg-type]
    (value,) = names.values()
    assert caught.value.message.startswith(f"{key}: '{value}' is none of ")
