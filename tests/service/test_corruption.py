"""Wrong bytes at decode: the digests name them, and the tokens alone would not."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from app.engine.load import load_engine
from app.errors import Corruption
from demo.prompts import demo_prompts
from tests.support import inprocess
from tests.support.faults import Sent
from tests.support.harness import Cluster

TOKENS = 200
NEW_TOKENS = 6
Pools = dict[str, Any]
Spoil = Callable[[Pools, list[int]], None]


def swap(pools: Pools, pages: list[int]) -> None:
    """Two pages of one late layer change places."""
    (pool,) = (pools[name] for name in pools if name in ("target.kv", "target.latent"))
    last = pool.shape[0] - 1
    one, two = pages[3], pages[5]
    pool[last, [one, two]] = pool[last, [two, one]]


def flip(pools: Pools, pages: list[int]) -> None:
    """The lowest bit of one byte."""
    (pool,) = (pools[name] for name in pools if name in ("target.kv", "target.latent"))
    pool[1, pages[2], 0] ^= 1


def zero(pools: Pools, pages: list[int]) -> None:
    """A page of the draft's latent is zeroes."""
    pools["draft.latent"][:, pages[4]] = 0


CASES = [
    pytest.param("smollm2", swap, "target.kv", marks=pytest.mark.real),
    pytest.param("smollm2", flip, "target.kv", marks=pytest.mark.real),
    ("glm-dsa-tiny", flip, "target.latent"),
    ("glm-dsa-tiny", zero, "draft.latent"),
]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Real models take longer than toys, and half a gigabyte each, which the collector does not see."""
    monkeypatch.setattr(inprocess, "WITHIN_S", 120.0)
    yield
    gc.collect()


def prompt_for(model: str) -> list[int]:
    _, text = load_engine(name="toy", page_size=16, dtype="auto", device="cpu", threads=1)
    if model == "smollm2":
        from app.engine.models.files import model_files
        from app.engine.models.hf import HfText

        text = HfText(model_files(model))
    return demo_prompts(text)[0].tokens[:TOKENS]  # type: ignore[arg-type]


async def served(cluster: Cluster, model: str, digests: str, spoil: Spoil | None) -> Any:
    """A request whose bytes at decode are spoilt after they have landed and before decode hears of it."""
    # in one piece: nothing has been compared before it is spoilt
    common = {
        "model": {"name": model, "draft_tokens": 2},
        "transfer": {"digests": digests, "mode": "monolithic"},
    }
    await cluster.start(common, common)
    legs = cluster.start_both(prompt_for(model), new_tokens=NEW_TOKENS)

    def at_the_end(sent: Sent) -> None:
        if sent.kind == "complete" and spoil is not None:
            assert legs.decode.pages is not None
            spoil(dict(cluster.decode.context.pool.host_arrays()), legs.decode.pages.tolist())

    cluster.wire.rule = at_the_end
    await legs.answered()
    await cluster.free()
    return legs


@pytest.mark.case("N3")
@pytest.mark.parametrize(("model", "spoil", "buffer"), CASES)
async def test_the_digests_name_wrong_bytes(cluster: Cluster, model: str, spoil: Spoil, buffer: str) -> None:
    """Swapped pages, a flipped bit and a zeroed draft page fail the request on both sides, by the buffer's name."""
    legs = await served(cluster, model, "full", spoil)
    for job in legs.jobs:
        assert isinstance(job.life.reason, Corruption)
        assert f"page digest differs: {buffer} layer" in job.life.reason.message
    assert await legs.tokens() == []


@pytest.mark.parametrize(("model", "spoil", "buffer"), CASES)
async def test_tokens_alone_would_not_notice(cluster: Cluster, model: str, spoil: Spoil, buffer: str) -> None:
    """Without digests the same wrong bytes give the very tokens of right ones: they prove too little."""
    legs = await served(cluster, model, "off", spoil)
    right = Cluster()
    try:
        good = await served(right, model, "off", None)
        expected = [t.token for t in await good.tokens()]
    finally:
        await right.close()
    assert legs.decode.facts["page_digest"] != legs.prefill.facts["page_digest"]
    assert [t.token for t in await legs.tokens()] == expected
    assert len(expected) == NEW_TOKENS
