"""Which host layout, copy backend and storage go together; decided once, before a page is mapped.

                       direct   kernel   storage   why not
    layer_first         yes      yes      yes
    page_first           -       yes      yes      a copy engine would need one submission for every page and layer,
                                                   off any boundary: page_first_direct is that order on boundaries
    page_first_direct   yes      yes      yes
    layer_page_first    yes       -        -       a page is in as many places as it has layers, and rows of a layer
                                                   are made for a copy engine: a kernel gains nothing from them

Shared KV has no storage yet: what a rank stores is per layer and page, and a storage's pages are whole.
"""

from __future__ import annotations

from typing import Final, Literal, TypeVar, get_args

from app.errors import SettingsError

Layout = Literal["layer_first", "page_first", "page_first_direct", "layer_page_first"]
Backend = Literal["direct", "kernel"]
Storage = Literal["none", "file"]

_Name = TypeVar("_Name", bound=str)

LAYOUTS: Final[tuple[Layout, ...]] = get_args(Layout)
BACKENDS: Final[tuple[Backend, ...]] = get_args(Backend)
STORAGES: Final[tuple[Storage, ...]] = get_args(Storage)

LAYOUT_KEY: Final = "hicache.layout"
BACKEND_KEY: Final = "hicache.copy_backend"
STORAGE_KEY: Final = "hicache.storage"

_BACKENDS_OF: Final[dict[Layout, tuple[Backend, ...]]] = {
    "layer_first": ("direct", "kernel"),
    "page_first": ("kernel",),
    "page_first_direct": ("direct", "kernel"),
    "layer_page_first": ("direct",),
}
_WITHOUT_STORAGE: Final[frozenset[Layout]] = frozenset({"layer_page_first"})


def require_pairing(
    *, layout: str, copy_backend: str, storage: str = "none", shared_kv: bool = False
) -> tuple[Layout, Backend, Storage]:
    """The three names, known to go together. SettingsError, naming the keys to change, when they do not."""
    chosen = _one_of(LAYOUT_KEY, layout, LAYOUTS)
    backend = _one_of(BACKEND_KEY, copy_backend, BACKENDS)
    store = _one_of(STORAGE_KEY, storage, STORAGES)
    if backend not in _BACKENDS_OF[chosen]:
        raise SettingsError(
            f"{BACKEND_KEY} ({backend}) does not work with {LAYOUT_KEY} ({chosen}): "
            f"it takes {' or '.join(_BACKENDS_OF[chosen])}"
        )
    if store != "none" and chosen in _WITHOUT_STORAGE:
        raise SettingsError(
            f"{STORAGE_KEY} ({store}) does not work with {LAYOUT_KEY} ({chosen}): a page of it has no address"
        )
    if store != "none" and shared_kv:
        raise SettingsError(
            f"{STORAGE_KEY} ({store}) does not work with shared KV: a rank holds single layers of single pages"
        )
    return chosen, backend, store


def _one_of(key: str, value: str, allowed: tuple[_Name, ...]) -> _Name:
    for name in allowed:
        if name == value:
            return name
    raise SettingsError(f"{key}: {value!r} is none of {', '.join(allowed)}")
