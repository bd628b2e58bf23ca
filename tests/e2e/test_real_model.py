"""Real weights, real engine, processes of their own: what is decoded is what was computed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anyio
import httpx
import pytest

from app.engine.base import Engine, Text
from app.engine.load import load_engine
from app.engine.local import LocalRun, run_locally
from app.tiers.device import DevicePool
from demo.cluster import Cluster, NodeProcess, cluster
from demo.prompts import demo_prompts
from tests.support.legs import Pair, body_for, both_legs, wait_free

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

NEW_TOKENS = 4
THREADS = 2
LENGTHS = (1, 63, 64, 65, 130, 1500)
CHUNKS = {"one chunk": 2048, "several chunks": 64, "chunks of 512": 512}
MODES = ("per_layer", "monolithic")


def _prefill_flags() -> list[list[str]]:
    return [
        ["--transfer.mode", mode, "--prefill.chunk-tokens", str(chunk)]
        for mode in MODES
        for chunk in (2048, 512, 64)
    ]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One decode node, and a prefill node for each mode and chunk size, behind no router."""
    flags = ["--model.name", "smollm2", "--model.threads", str(THREADS), "--trace", "true"]
    # these prompts begin alike, and whole transfers are what is compared here
    flags += [
        "--transfer.digests",
        "full",
        "--cache.pages",
        "64",
        "--cache.slots",
        "32",
        "--cache.reuse",
        "off",
    ]
    folder = tmp_path_factory.mktemp("nodes")
    with cluster(folder, flags=flags, prefill_flags=_prefill_flags(), router=False) as running:
        yield running


@pytest.fixture(scope="module")
def model() -> tuple[Engine, Text]:
    engine, text = load_engine(name="smollm2", page_size=64, dtype="auto", device="cpu", threads=THREADS)
    engine.bind([DevicePool(engine.geometry, 64)])
    return engine, text


@pytest.fixture(scope="module")
def prompt(model: tuple[Engine, Text]) -> list[int]:
    return demo_prompts(model[1])[0].tokens  # type: ignore[arg-type]


_references: dict[tuple[int, int], LocalRun] = {}


def reference(model: tuple[Engine, Text], prompt: list[int], chunk_tokens: int) -> LocalRun:
    """The same model without transfer; only whole prompts below a chunk share a run."""
    effective = 2048 if len(prompt) <= chunk_tokens else chunk_tokens
    key = (hash(tuple(prompt)), effective)
    if key not in _references:
        _references[key] = run_locally(model[0], prompt, chunk_tokens=effective, new_tokens=NEW_TOKENS)
    return _references[key]


def node_for(nodes: Cluster, mode: str, chunk_tokens: int) -> NodeProcess:
    return nodes.prefill[
        _prefill_flags().index(["--transfer.mode", mode, "--prefill.chunk-tokens", str(chunk_tokens)])
    ]


def record(node: NodeProcess, room: int) -> dict[str, Any]:
    return next(r for r in node.get("/rooms")["ended"] if r["room"] == room)


def require_equal(pair: Pair, prefill: NodeProcess, decode: NodeProcess, run: LocalRun) -> dict[str, Any]:
    """Page digests first, then logits bit for bit, then tokens. The prefill side's record."""
    assert pair.prefill.status_code == 200, pair.prefill.text
    assert pair.decode.status_code == 200, pair.decode.text
    sent, landed = record(prefill, pair.room), record(decode, pair.room)
    assert sent["page_digest"] == landed["page_digest"]
    first = pair.prefill.json()["meta_info"]["kvferry"]["logits"]
    rest = pair.decode.json()["meta_info"]["kvferry"]["logits"][1:]
    assert first + rest == run.logits
    assert pair.decode.json()["output_ids"] == run.tokens
    return sent


@pytest.mark.contract(100, 113, 117)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("length", "chunk_tokens"),
    [(n, 2048) for n in LENGTHS] + [(65, 64), (130, 64), (1500, 512)],
)
async def test_transferred_answer_equals_local_run(
    nodes: Cluster, model: tuple[Engine, Text], prompt: list[int], mode: str, length: int, chunk_tokens: int
) -> None:
    """Every prompt length, in one chunk and several, in both modes, gives the local run's bits."""
    tokens = prompt[:length]
    prefill, decode = node_for(nodes, mode, chunk_tokens), nodes.decode[0]
    pair = await both_legs(prefill, decode, body_for(prefill, tokens, new_tokens=NEW_TOKENS))
    sent = require_equal(pair, prefill, decode, reference(model, tokens, chunk_tokens))
    pages = -(-length // 64)
    assert sent["pages"] == pages
    assert sent["sent_bytes"] == pages * model[0].geometry.page_bytes()
    assert sent["chunks"] == -(-length // chunk_tokens)
    per_chunk = 5 if mode == "per_layer" else 30
    assert sent["groups"] == per_chunk * sent["chunks"]
    await wait_free(prefill, decode)


async def test_twenty_requests_at_once(nodes: Cluster, model: tuple[Engine, Text], prompt: list[int]) -> None:
    """Twenty requests that share pools, engine and threads each get their own answer."""
    prefill, decode = node_for(nodes, "per_layer", 64), nodes.decode[0]
    prompts = [prompt[i * 11 : i * 11 + 5 + 8 * i] for i in range(20)]
    pairs: dict[int, Pair] = {}

    async def one(number: int) -> None:
        body = body_for(prefill, prompts[number], new_tokens=NEW_TOKENS)
        pairs[number] = await both_legs(prefill, decode, body, timeout_s=600)

    async with anyio.create_task_group() as group:
        for number in range(20):
            group.start_soon(one, number)
    for number, tokens in enumerate(prompts):
        require_equal(pairs[number], prefill, decode, reference(model, tokens, 64))
    await wait_free(prefill, decode)


async def test_text_through_the_real_router(
    nodes: Cluster, model: tuple[Engine, Text], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The public router reaches both nodes; completions, chat and streams give the local run's text."""
    from demo.cluster import Router

    engine, text = model
    router = Router(tmp_path_factory.mktemp("router"), [node_for(nodes, "per_layer", 2048)], nodes.decode)
    try:
        router.wait_ready()
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        run = run_locally(engine, text.chat(messages), chunk_tokens=2048, new_tokens=8)
        expected = text.decode([t for t in run.tokens if t not in engine.stop_tokens])
        chat = {"model": "smollm2", "messages": messages, "temperature": 0, "max_tokens": 8}
        async with httpx.AsyncClient(timeout=120, base_url=router.url) as client:
            answer = (await client.post("/v1/chat/completions", json=chat)).json()
            assert answer["choices"][0]["message"]["content"] == expected
            streamed = await client.post("/v1/chat/completions", json={**chat, "stream": True})
            assert streamed.text.rstrip().endswith("data: [DONE]")
            native = {
                "text": "The capital of France is",
                "sampling_params": {"temperature": 0, "max_new_tokens": 4},
            }
            run = run_locally(engine, text.encode(native["text"]), chunk_tokens=2048, new_tokens=4)  # type: ignore[arg-type]
            generated = (await client.post("/generate", json=native)).json()
            assert generated["output_ids"] == run.tokens
            plain = {"model": "smollm2", "prompt": native["text"], "temperature": 0, "max_tokens": 4}
            completed = (await client.post("/v1/completions", json=plain)).json()
            assert completed["choices"][0]["text"] == text.decode(run.tokens)
    finally:
        router.stop()
    await wait_free(nodes.prefill[0], nodes.decode[0])
