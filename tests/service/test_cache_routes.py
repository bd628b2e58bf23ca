"""GET /cache and POST /cache/flush: what an operator is told of the tiers is true."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from app.service.node import Node
from tests.service.test_two_tiers import settled, sides
from tests.support.harness import PAGE, Cluster, eventually, prompt_of


async def shown(cluster: Cluster, node: Node) -> Any:
    answer = await cluster.call(node, "GET", "/cache")
    assert answer.status_code == 200
    return answer.json()


async def flush(cluster: Cluster, node: Node, **body: Any) -> Any:
    answer = await cluster.call(node, "POST", "/cache/flush", json.dumps(body).encode())
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("kind", ["off", "l1", "l2"])
async def test_occupancy_and_hits_add_up(cluster: Cluster, kind: str) -> None:
    """After two passes of a prompt the tiers hold its pages once, and the tokens are counted where they were found."""
    await cluster.start(*sides(kind))
    for _ in range(2):
        await cluster.serve(prompt_of(9 * PAGE + 2))
        await settled(cluster)
    found = await shown(cluster, cluster.prefill)
    kept = 0 if kind == "off" else 9
    l1, l2 = found["l1"], found["l2"]
    assert (l1["resident_pages"], l1["in_flight_pages"], l1["free_pages"]) == (kept, 0, l1["pages"] - kept)
    assert (l2 or {}).get("resident_pages", 0) == (9 if kind == "l2" else 0)
    assert found["tokens"]["l1_hits"] == kept * PAGE
    assert found["pins"] == 0
    assert sum(found["pins_by_age_s"].values()) == 0
    assert found["instance"] == cluster.prefill.instance
    assert found["persistent"] is False
    assert 0 < l1["largest_extent"] <= l1["free_pages"]
    assert (found["host_bytes"] > 0) is (kind == "l2")
    await cluster.free()


@pytest.mark.case("O6")
@pytest.mark.parametrize("kind", ["l1", "l2"])
async def test_a_flush_during_a_transfer_says_what_stayed(cluster: Cluster, kind: str) -> None:
    """While a room is sending, its pages are not touched and the answer says so; afterwards everything goes."""
    await cluster.start(*sides(kind))
    await cluster.serve(prompt_of(5 * PAGE + 1, salt=1))
    await settled(cluster)
    cluster.writer.hold()
    legs = cluster.start_both(prompt_of(6 * PAGE + 1))
    await eventually(cluster.writer.in_flight)
    await eventually(lambda: legs.prefill.lease is not None and legs.prefill.phases.forward_end)
    await settled(cluster)
    told = await flush(cluster, cluster.prefill)
    assert told["status"] == "partial"
    assert (told["rooms"], told["leases"]) == (1, 1)
    assert told["l1_pages"] == 5
    assert told["l1_stayed"] >= 6
    cluster.writer.let_go()
    await cluster.expect_local(legs)
    await cluster.free()
    told = await flush(cluster, cluster.prefill)
    assert (told["status"], told["rooms"], told["l1_stayed"], told["l2_stayed"]) == ("flushed", 0, 0, 0)
    assert cluster.prefill.context.cache.cached_pages == 0


async def test_l1_alone_can_be_emptied(cluster: Cluster) -> None:
    """What is in L2 too is still a hit after a flush of L1."""
    await cluster.start(*sides())
    prompt = prompt_of(5 * PAGE + 1)
    await cluster.serve(prompt)
    await settled(cluster)
    told = await flush(cluster, cluster.prefill, tier="l1")
    assert (told["status"], told["l1_pages"], told["l2_pages"]) == ("flushed", 5, 0)
    assert (await cluster.serve(prompt)).prefill.facts["l2_tokens"] == 5 * PAGE
    await cluster.free()


@pytest.mark.parametrize("kind", ["l1", "l2"])
async def test_a_salt_can_be_purged(cluster: Cluster, kind: str) -> None:
    """A tenant's pages go from every tier, and another tenant's stay."""
    await cluster.start(*sides(kind))
    prompt = prompt_of(5 * PAGE + 1)
    for salt in ("a", "b"):
        await cluster.serve(prompt, salt=salt)
        await settled(cluster)
    told = await flush(cluster, cluster.prefill, cache_salt="a")
    assert told["l1_pages"] == 5
    assert (await cluster.serve(prompt, salt="b")).prefill.facts["cached_tokens"] == 5 * PAGE
    assert (await cluster.serve(prompt, salt="a")).prefill.facts["cached_tokens"] == 0
    await settled(cluster)
    await cluster.free()


@pytest.mark.parametrize("body", [{"tier": "l3"}, {"cache_salt": ""}, {"what": 1}, [], {"cache_salt": 5}])
async def test_bad_flushes_change_nothing(cluster: Cluster, body: Any) -> None:
    """An unknown tier, an empty salt, an unknown key: refused, and what is cached stays."""
    await cluster.start(*sides("l1"))
    await cluster.serve(prompt_of(3 * PAGE + 1))
    answer = await cluster.call(cluster.prefill, "POST", "/cache/flush", json.dumps(body).encode())
    assert answer.status_code == 422
    assert cluster.prefill.context.cache.cached_pages == 3


async def test_a_restarted_node_begins_empty(cluster: Cluster) -> None:
    """A restart has a new instance id and empty tiers, and says that nothing persists."""
    await cluster.start(*sides())
    await cluster.serve(prompt_of(5 * PAGE))
    before = await shown(cluster, cluster.prefill)
    after = await shown(cluster, await cluster.add("prefill", **sides()[0]))
    assert before["instance"] != after["instance"]
    assert (after["l1"]["resident_pages"], after["l2"]["resident_pages"]) == (0, 0)
    assert not after["persistent"]
    await settled(cluster)


async def test_salts_come_with_requests(cluster: Cluster) -> None:
    """`cache_salt` and `no_store` of a request's body reach the cache on every route that takes prompts."""
    await cluster.start(*sides("l1"))
    text = "tell me about the ferry between the two piers, and then once more about the lighthouse"
    room = iter(range(700, 800))

    async def ask(path: str, **more: Any) -> None:
        body = {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": int(cluster.prefill.url.rpartition(":")[2]),
            "bootstrap_room": next(room),
            **(
                {"text": text} if path == "/generate" else {"prompt": text, "max_tokens": 2, "temperature": 0}
            ),
            **({"sampling_params": {"max_new_tokens": 2}} if path == "/generate" else {}),
            **more,
        }
        content = json.dumps(body).encode()
        both = await asyncio.gather(
            *(cluster.call(node, "POST", path, content) for node in (cluster.prefill, cluster.decode))
        )
        assert [answer.status_code for answer in both] == [200, 200], [answer.text for answer in both]

    cache = cluster.prefill.context.cache
    await ask("/generate", no_store=True)
    await ask("/v1/completions", no_store=True)
    assert cache.cached_pages == 0
    for path in ("/generate", "/v1/completions"):
        await ask(path, cache_salt="one")
        assert cache.tree.stats().namespaces == 1
    await ask("/v1/completions", cache_salt="two")
    assert cache.tree.stats().namespaces == 2
    await cluster.free()
