"""How a prompt is cut into chunks, and which positions each chunk sends.

    page 64, 130 tokens, chunks of 100 tokens
    tokens     0        64   100   128 130
    pages      |---- 0 ----|---- 1 ----|2|
    chunk 0    [== forward ====)            sends position 0 (position 1 is half filled)
    chunk 1                    [== forward =) sends positions 1, 2

A page is sent by the chunk that fills it, and the last chunk sends what is left. A cached prefix is not
forwarded, but the first chunk sends it. Boundaries are multiples of the chunk's length, counted from the
prompt's first token, whatever was cached: a moved boundary would change the low bits of what is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

from app.core.pages import floor_to_page, pages_for
from app.errors import BadInput


@dataclass(frozen=True, kw_only=True)
class ChunkPlan:
    """One forward. Tokens `start`..`end` are computed, positions `first_page`..`last_page` are sent."""

    index: int
    start: int
    end: int
    first_page: int
    last_page: int
    is_last: bool

    @property
    def tokens(self) -> int:
        return self.end - self.start

    @property
    def pages(self) -> int:
        return self.last_page - self.first_page


def chunk_page_start(chunk_key: int, page_size: int) -> int:
    """First position of a send that starts at token `chunk_key`, which is on the page grid."""
    if chunk_key % page_size:
        raise BadInput(f"a send starts on the page grid, not at token {chunk_key}")
    return chunk_key // page_size


def plan_chunks(
    prompt_tokens: int,
    *,
    page_size: int,
    chunk_tokens: int,
    cached_tokens: int = 0,
    first_position: int = 0,
) -> tuple[ChunkPlan, ...]:
    """Cut a prompt.

    `cached_tokens` are already in this node's pages; at least one token is always computed, since the
    first output token needs its logits. `first_position` is the first page that the receiver lacks.
    The last chunk may send no page at all: it still carries the metadata.
    """
    if prompt_tokens < 1 or chunk_tokens < 1:
        raise BadInput(f"cannot cut {prompt_tokens} tokens into chunks of {chunk_tokens}")
    if not 0 <= cached_tokens < prompt_tokens:
        raise BadInput(f"cached prefix of {cached_tokens} in a prompt of {prompt_tokens} tokens")
    plans: list[ChunkPlan] = []
    start, sent = cached_tokens, first_position
    while start < prompt_tokens:
        end = min((start // chunk_tokens + 1) * chunk_tokens, prompt_tokens)
        is_last = end == prompt_tokens
        key_end = end if is_last else floor_to_page(end, page_size)
        upto = max(pages_for(key_end, page_size), sent)
        plans.append(
            ChunkPlan(
                index=len(plans), start=start, end=end, first_page=sent, last_page=upto, is_last=is_last
            )
        )
        start, sent = end, upto
    return tuple(plans)
