"""Nodes in processes of their own do not grow: thousands of requests through both tiers."""

from __future__ import annotations

import random
from collections.abc import Iterator

import anyio
import httpx
import pytest

from demo.cluster import Cluster, NodeProcess, cluster
from tests.support.legs import body_for, wait_free

pytestmark = pytest.mark.timeout(900)

WARM, TOTAL = 200, 2000
AT_ONCE = 8


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Small pools, so that the first requests have touched every page of both tiers."""
    flags = ["--model.name", "toy-dsa", "--cache.page-size", "16", "--cache.pages", "64"]
    flags += [
        "--hicache.host-ratio",
        "2",
        "--prefill.chunk-tokens",
        "64",
        "--prefill.max-input-tokens",
        "512",
    ]
    with cluster(tmp_path_factory.mktemp("nodes"), flags=flags, router=False) as running:
        yield running


def prompts(count: int, seed: int) -> list[list[int]]:
    """Conversations that come back, and prompts that never do."""
    draws = random.Random(seed)
    known = [[draws.randrange(250) for _ in range(200)] for _ in range(8)]
    made = []
    for _ in range(count):
        again = draws.random() < 0.5
        start = draws.choice(known)[: draws.randrange(20, 200)] if again else []
        made.append([*start, *(draws.randrange(250) for _ in range(draws.randrange(1, 150)))])
    return made


async def serve(nodes: Cluster, count: int, seed: int) -> None:
    prefill, decode = nodes.prefill[0], nodes.decode[0]
    places = anyio.CapacityLimiter(AT_ONCE)
    limits = httpx.Limits(max_connections=4 * AT_ONCE)
    async with httpx.AsyncClient(timeout=60, limits=limits) as client, anyio.create_task_group() as group:

        async def one(prompt: list[int]) -> None:
            body = body_for(prefill, prompt, new_tokens=3)

            async def post(node: NodeProcess) -> None:
                answer = await client.post(f"{node.url}/generate", json=body)
                assert answer.status_code == 200, answer.text

            async with places, anyio.create_task_group() as legs:
                legs.start_soon(post, prefill)
                legs.start_soon(post, decode)

        for prompt in prompts(count, seed):
            group.start_soon(one, prompt)


def resident(nodes: Cluster) -> list[int]:
    return [node.get("/stats")["memory"]["rss_bytes"] for node in (nodes.prefill[0], nodes.decode[0])]


async def test_two_thousand_requests_take_no_more_memory_than_two_hundred(nodes: Cluster) -> None:
    """The resident set after 2,000 requests is within 5 % of that after 200, on both sides, and all is free again."""
    both = nodes.prefill[0], nodes.decode[0]
    await serve(nodes, WARM, seed=1)
    await wait_free(*both)
    await anyio.sleep(2.5)  # an idle node gives freed memory back
    before = resident(nodes)
    await serve(nodes, TOTAL - WARM, seed=2)
    await wait_free(*both)
    await anyio.sleep(2.5)
    after = resident(nodes)
    assert [now / then < 1.05 for now, then in zip(after, before, strict=True)] == [True, True], (
        before,
        after,
    )
    for node in both:
        found = node.get("/cache")
        assert found["tokens"]["l1_hits"] + found["tokens"]["l2_hits"] > 0
        assert found["l1"]["evicted_pages"] > 0
        assert found["holds"] == []
