"""A model without weights whose output depends on every cached byte.

Row p of layer l is a hash chained over the tokens up to p, read back from the pool; the next token is a
hash over all rows. One wrong byte anywhere in a page changes every token after it, which a real model's
greedy tokens often hide. It runs in milliseconds, for tests, campaigns and a first look at a deployment.

It can have what larger models have: index rows on some layers, a draft (toy_draft.py), ranks that share one copy.
The ranks are played one after the other, through the same code that stores and reads by owner elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import xxhash

from app.core.geometry import BufferSpec, CacheGeometry
from app.core.ids import Owner, PageArray, Source
from app.core.pages import pages_for
from app.engine.base import Forwarded, ForwardStep, LayerHooks
from app.engine.models import toy_state
from app.engine.models.toy_draft import DRAFT_ROW_BYTES, ToyDraft
from app.engine.models.toy_state import HASH_BYTES, INDEX_ROW_BYTES, SUM_BYTES, Bytes
from app.engine.paged.formats import PageFormat, Plain
from app.engine.paged.rows import RankPools, RankRows, RowLayout, require_pages
from app.engine.paged.splits import Split, split_rows
from app.errors import BadInput, InvalidRequest
from app.tiers.device import DevicePool

_EOS = 256
_VOCABULARY = 257


class ToyEngine:
    """`row_bytes` are stored a token and layer: the hash, repeated."""

    def __init__(
        self,
        *,
        page_size: int,
        layers: int = 12,
        row_bytes: int = 64,
        layer_delay_s: float = 0.0,
        ranks: int = 1,
        draft: bool = False,
        index_layers: Sequence[int] = (),
        split: Split = "zigzag",
    ) -> None:
        self.layers = layers
        self.index_layers = tuple(index_layers)
        self.name = "toy-dsa" if draft or index_layers else "toy"
        self.revision = f"toy-{layers}x{row_bytes}"
        if draft or index_layers:
            self.revision += f"-index{','.join(map(str, self.index_layers))}-draft{int(draft)}"
        self.compute_dtype = "uint8"
        self.vocabulary = _VOCABULARY
        self.max_positions = 1 << 20
        self.hidden_size = SUM_BYTES + HASH_BYTES * layers
        self.stop_tokens = frozenset({_EOS})
        self.layer_delay_s = layer_delay_s
        self.ranks = ranks
        self._split: Split = split
        self._page_size = page_size
        self._row_bytes = row_bytes
        sizes: list[tuple[Owner, str, tuple[int, ...], int]] = [
            ("target", "kv", tuple(range(layers)), row_bytes),
            ("target", "index", self.index_layers, INDEX_ROW_BYTES),
            ("draft", "kv", (layers,) if draft else (), DRAFT_ROW_BYTES),
        ]
        kept = [entry for entry in sizes if entry[2]]
        self.formats = {
            f"{owner}.{kind}": PageFormat(
                page_size=page_size,
                codec=Plain(stored=torch.uint8, compute=torch.uint8, widths=(size,)),
            )
            for owner, kind, _, size in kept
        }
        self.geometry = CacheGeometry(
            page_size=page_size,
            buffers=tuple(
                BufferSpec(owner=owner, kind=kind, layer_ids=ids, item_bytes=page_size * size, dtype="uint8")
                for owner, kind, ids, size in kept
            ),
        )
        self._pools: RankPools | None = None
        self._draft = ToyDraft(self, layer=layers) if draft else None

    @property
    def draft(self) -> ToyDraft | None:
        return self._draft

    def bind(self, pools: Sequence[DevicePool]) -> None:
        if len(pools) != self.ranks:
            raise BadInput(f"{self.ranks} ranks need as many pools, not {len(pools)}")
        self._pools = RankPools(self.geometry, self.formats, pools)

    @property
    def pools(self) -> RankPools:
        if self._pools is None:
            raise BadInput("the engine is not bound to its pools")
        return self._pools

    def forward(self, step: ForwardStep, hooks: LayerHooks) -> Forwarded:
        end = step.start + len(step.tokens)
        require_pages(step.pages, end, self._page_size)
        if not step.tokens:
            raise InvalidRequest("a forward needs at least one token")
        for layer in range(self.layers):
            self._forward_layer(layer, step, hooks)
        plain = self._draft is None and not self.index_layers
        if plain:
            return Forwarded(logits=self._plain_logits(step, end), hidden=None)
        return self._summed(step, end)

    def _forward_layer(self, layer: int, step: ForwardStep, hooks: LayerHooks) -> None:
        if step.start:
            hooks.before_read(layer)
        above = self.hash_before("target.kv", layer, step.pages, step.start)
        digests: list[bytes] = []
        for token in step.tokens:
            above = toy_state.chained(above, token, layer)
            digests.append(above)
        rows = toy_state.filled(digests, self._row_bytes)
        self.store("target.kv", layer, step.pages, step.start, rows)
        if layer in self.index_layers:
            if step.start:
                hooks.before_read(layer)
            index = [toy_state.index_of(digest, layer) for digest in digests]
            rows = toy_state.filled(index, INDEX_ROW_BYTES)
            self.store("target.index", layer, step.pages, step.start, rows)
        self.end_layer(layer, "target", hooks)

    def end_layer(self, layer: int, source: Source, hooks: LayerHooks) -> None:
        if self.layer_delay_s:
            time.sleep(self.layer_delay_s)
        hooks.after_write(layer, source)

    def hash_before(self, name: str, layer: int, table: PageArray, start: int) -> bytes:
        """What the first new row is chained to: read from its pages; nothing at the start."""
        if not start:
            return b""
        logical = int(table[(start - 1) // self._page_size])
        rank, physical = divmod(logical, self.pools.pages_per_rank)
        row_bytes = self.formats[name].row_bytes
        at = (start - 1) % self._page_size * row_bytes
        return self.pools.region(rank, name, layer)[physical, at : at + HASH_BYTES].numpy().tobytes()

    def store(self, name: str, layer: int, table: PageArray, start: int, rows: Bytes) -> None:
        """The ranks' rows, one rank's behind the other's, to the pools of their pages' owners."""
        order = np.concatenate(split_rows(len(rows), self.ranks, self._split))
        current = RankRows(
            layout=RowLayout.RANK_LOCAL if self.ranks > 1 else RowLayout.SEQUENCE,
            positions=torch.from_numpy(start + order),
            rows=torch.from_numpy(rows[order]),
        )
        pages = torch.from_numpy(table)
        for rank in range(self.ranks):
            self.pools.store_owned(rank, name, layer, pages, [current])

    def rows(self, name: str, layer: int, table: PageArray, end: int) -> Bytes:
        """The first `end` rows of a layer, from whoever owns them."""
        used = torch.from_numpy(table[: pages_for(end, self._page_size)])
        if self.ranks == 1:
            alone: Bytes = self.formats[name].gather(self.pools.region(0, name, layer), used)[:end].numpy()
            return alone
        row_bytes = self.formats[name].row_bytes
        full = torch.empty((len(used), self._page_size, row_bytes), dtype=torch.uint8)
        for rank in range(self.ranks):
            places, encoded = self.pools.owned_rows(rank, name, layer, used)
            full[places] = encoded
        result: Bytes = full.flatten(0, 1)[:end].numpy()
        return result

    def _plain_logits(self, step: ForwardStep, end: int) -> torch.Tensor | None:
        """A hash over all rows up to each wanted one."""
        if step.logits == "none":
            return None
        layers = [self.rows("target.kv", layer, step.pages, end) for layer in range(self.layers)]
        found = []
        for upto in range(step.start + 1 if step.logits == "all" else end, end + 1):
            digest = xxhash.xxh3_64()
            for rows in layers:
                digest.update(rows[:upto].tobytes())
            seed = digest.intdigest()
            token = toy_state.FIRST_TOKEN + seed % toy_state.TOKENS
            found.append(toy_state.logits_of(seed, token, _VOCABULARY, _EOS))
        return torch.from_numpy(np.stack(found))

    def _summed(self, step: ForwardStep, end: int) -> Forwarded:
        """Logits and states out of the sums over all rows, index rows included."""
        hashes = np.empty((len(step.tokens), self.layers, HASH_BYTES), dtype=np.uint8)
        totals = np.zeros(end, dtype=np.uint64)
        with np.errstate(over="ignore"):
            for layer in range(self.layers):
                rows = self.rows("target.kv", layer, step.pages, end)
                hashes[:, layer] = rows[step.start :, :HASH_BYTES]
                totals += toy_state.row_sums(rows, 0, 2 * layer)
                if layer in self.index_layers:
                    index = self.rows("target.index", layer, step.pages, end)
                    totals += toy_state.row_sums(index, 0, 2 * layer + 1)
            sums = np.cumsum(totals, dtype=np.uint64)[step.start :]
        hidden = None
        if self._draft is not None:
            parts = [sums.view(np.uint8).reshape(-1, SUM_BYTES), hashes.reshape(len(sums), -1)]
            hidden = torch.from_numpy(np.concatenate(parts, axis=1).astype(np.float32))
        wanted = {"none": sums[:0], "last": sums[-1:], "all": sums}[step.logits]
        if not len(wanted):
            return Forwarded(logits=None, hidden=hidden)
        logits = [self.logits_of(int(total), toy_state.token_of(int(total))) for total in wanted]
        return Forwarded(logits=torch.from_numpy(np.stack(logits)), hidden=hidden)

    def logits_of(self, seed: int, token: int) -> Any:
        return toy_state.logits_of(seed, token, _VOCABULARY, _EOS)

    def added_by(self, digests: Sequence[bytes], layer: int, first_position: int) -> toy_state.Words:
        """What rows with these hashes, and their index rows, add to the sums."""
        rows = toy_state.filled(digests, self._row_bytes)
        added = toy_state.row_sums(rows, first_position, 2 * layer)
        if layer in self.index_layers:
            index = [toy_state.index_of(digest, layer) for digest in digests]
            rows = toy_state.filled(index, INDEX_ROW_BYTES)
            with np.errstate(over="ignore"):
                added = added + toy_state.row_sums(rows, first_position, 2 * layer + 1)
        return added


class ToyText:
    """Bytes are tokens."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        lines = [f"{m.get('role', 'user')}: {m.get('content', '')}\n" for m in messages]
        return self.encode("".join(lines) + "assistant: ")

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(t for t in tokens if t < _EOS).decode(errors="replace")
