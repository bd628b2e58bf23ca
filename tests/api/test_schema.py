"""Generated calls over the whole OpenAPI document: never a 500, and nothing changes without the scope."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from app.api.auth import needed
from app.api.document import openapi_document
from app.settings.credentials import Scope
from demo.cluster import Cluster, NodeProcess, cluster, free_port
from tests.support.legs import body_for

TOKENS = {scope: f"{scope}-{secrets.token_hex(8)}" for scope in Scope}
SCHEMA = schemathesis.openapi.from_dict(json.loads(openapi_document()))
OPERATIONS = {f"{o.ok().method.upper()} {o.ok().path}": o.ok() for o in SCHEMA.get_all_operations()}
_MODELS = json.loads(openapi_document())["components"]["schemas"]


def parts(operation: Any) -> set[str]:
    """The keys of a call's body."""
    written = json.dumps(operation.definition.raw.get("requestBody", {}))
    models = re.findall(r"components/schemas/(\w+)", written)
    return {key for model in models for key in _MODELS[model]["properties"]}


PARTS = {name: parts(operation) for name, operation in OPERATIONS.items()}
_BOUNDED = settings(
    max_examples=12,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A node of each role with a token for each scope, and short deadlines for legs that stay alone."""
    flags = ["--model.name", "toy", "--auth.token", TOKENS[Scope.ADMIN]]
    for scope in (Scope.READ, Scope.REQUEST, Scope.PEER):
        flags += [f"--auth.{scope}-token", TOKENS[scope]]
    flags += ["--deadlines.bootstrap-s", "0.2", "--deadlines.parked-s", "0.2", "--deadlines.transfer-s", "1"]
    port = free_port()
    # a generated port must not be that of somebody else on this machine
    flags += ["--limits.bootstrap-hosts", f'["127.0.0.1:{port}"]']
    prefill_flags = (["--http.port", str(port)],)
    folder = tmp_path_factory.mktemp("nodes")
    with cluster(folder, flags=flags, prefill_flags=prefill_flags, router=False) as running:
        served = [serve(running) for _ in range(5)]
        assert 200 in served, served
        yield running


def serve(nodes: Cluster) -> int:
    """A valid request to both, so that they have met; decode's status."""
    body = body_for(nodes.prefill[0], [65, 66])
    headers = {"Authorization": f"Bearer {TOKENS[Scope.REQUEST]}"}
    with ThreadPoolExecutor() as pool:
        legs = [
            pool.submit(requests.post, f"{node.url}/generate", json=body, headers=headers, timeout=30)
            for node in (nodes.prefill[0], nodes.decode[0])
        ]
    return legs[1].result().status_code


@pytest.fixture(scope="module")
def likely(nodes: Cluster) -> dict[str, Any]:
    """Values that generated calls would hardly guess, and that lead further into the service."""
    ids = {node.name: about(node, "/server_info")["instance"] for node in (nodes.prefill[0], nodes.decode[0])}
    return {
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": nodes.prefill[0].port,
        "bootstrap_room": 7,
        "input_ids": [1, 2, 3],
        "prompt": "a prompt",
        "text": None,
        "messages": [{"role": "user", "content": "x"}],
        "sampling_params": {"max_new_tokens": 2},
        "max_tokens": 2,
        "max_completion_tokens": 2,
        "stop": None,
        "n": 1,
        "seed": 1,
        "temperature": 0,
        "top_p": 1,
        "top_k": 0,
        "rid": "r",
        "model": "m",
        "cache_salt": None,
        "prefill_instance": ids["prefill-0"],
        "instance": ids["decode-0"],
        "pages": [3, 4],
        "slot": 1,
        "prompt_tokens": 3,
        "first_position": 0,
        "lookahead": 1,
        "generation": 1 << 40,
    }


@st.composite
def guesses(draw: st.DrawFn, likely: dict[str, Any]) -> dict[str, Any]:
    """Some of the likely values, or most of them."""
    left_out = draw(st.sets(st.sampled_from(sorted(likely)), max_size=3) | st.just(set(likely)))
    return {key: value for key, value in likely.items() if key not in left_out}


def cases(operation: Any) -> st.SearchStrategy[Any]:
    """Calls that follow the document, and calls that break it somewhere."""
    return st.one_of(*(operation.as_strategy(generation_mode=mode) for mode in GenerationMode))


def call(
    node: NodeProcess, session: requests.Session, case: Any, token: str | None, values: Any = ()
) -> requests.Response:
    """Send a case, with some values in place of its own where its body has such a part."""
    if isinstance(case.body, dict):
        case.body |= {k: v for k, v in dict(values).items() if k in PARTS[case.operation.label]}
    kwargs = case.as_transport_kwargs(base_url=node.url)
    given_headers = {k: v for k, v in (kwargs.pop("headers") or {}).items() if k.lower() != "authorization"}
    if token is not None:
        given_headers["Authorization"] = f"Bearer {token}"
    return session.request(**kwargs, headers=given_headers, timeout=30, allow_redirects=False)


def require_truthful(answer: requests.Response) -> None:
    """Not the service's own fault, and an error is a problem document that says what it is."""
    assert answer.status_code != 500, answer.text
    if answer.status_code >= 400:
        assert answer.headers["content-type"] == "application/problem+json", answer.text
        document = answer.json()
        assert document["status"] == answer.status_code
        assert document["type"].startswith("urn:kvferry:problem:") and document["detail"]
        assert (answer.status_code in (429, 503)) <= ("retry-after" in answer.headers)


def about(node: NodeProcess, path: str) -> Any:
    headers = {"Authorization": f"Bearer {TOKENS[Scope.READ]}"}
    return requests.get(f"{node.url}{path}", headers=headers, timeout=10).json()


def state(node: NodeProcess) -> Any:
    """What a call could have changed of a node."""
    stats = about(node, "/stats")
    return {k: stats.get(k) for k in ("pages", "slots", "rooms", "holds", "peers", "tombstones", "reuse")}


@pytest.mark.case("O4")
@pytest.mark.parametrize("name", [n for n in OPERATIONS if needed(*n.split(" ")) is not None])
def test_nothing_without_the_scope(nodes: Cluster, name: str) -> None:
    """Whatever a call says, without a token it is 401 and with those of other scopes 403, and the node is unchanged."""
    wanted = needed(*name.split(" "))
    others = [None, *(token for scope, token in TOKENS.items() if scope not in (wanted, Scope.ADMIN))]
    if wanted is Scope.PEER:
        others.append(TOKENS[Scope.ADMIN])
    both = nodes.prefill[0], nodes.decode[0]
    before = [state(node) for node in both]
    with requests.Session() as session:

        @_BOUNDED
        @given(case=cases(OPERATIONS[name]), token=st.sampled_from(others), node=st.sampled_from(both))
        def refused(case: Any, token: str | None, node: NodeProcess) -> None:
            answer = call(node, session, case, token)
            require_truthful(answer)
            if case.method.upper() == name.split(" ")[0]:  # a broken call may use another method
                assert answer.status_code == (401 if token is None else 403), answer.text

        refused()
    assert [state(node) for node in both] == before


@pytest.mark.contract(126)
@pytest.mark.case("O1")
@pytest.mark.parametrize("name", OPERATIONS)
def test_no_call_is_a_fault_of_the_service(nodes: Cluster, likely: dict[str, Any], name: str) -> None:
    """Whoever has the scope gets an answer or a problem for whatever is sent, and both nodes go on."""
    wanted = needed(*name.split(" "))
    token = None if wanted is None else TOKENS[wanted]
    both = nodes.prefill[0], nodes.decode[0]
    with requests.Session() as session:

        @_BOUNDED
        @given(case=cases(OPERATIONS[name]), node=st.sampled_from(both), values=guesses(likely))
        def answered(case: Any, node: NodeProcess, values: dict[str, Any]) -> None:
            require_truthful(call(node, session, case, token, values))

        answered()
    for node in both:
        assert requests.get(f"{node.url}/readyz", timeout=10).status_code == 200


def test_nothing_is_left(nodes: Cluster) -> None:
    """After all of that no internal error and no dead task is counted, no room is left, and requests are served."""
    until = time.monotonic() + 30
    for node in (nodes.prefill[0], nodes.decode[0]):
        while about(node, "/stats")["rooms"]["live"] and time.monotonic() < until:
            time.sleep(0.05)
        stats = about(node, "/stats")
        counters = stats["counters"]
        assert (counters.get("internal_errors", 0), counters.get("task_faults", 0)) == (0, 0)
        assert (stats["rooms"]["live"], stats["holds"], stats["slots"]["free"]) == (
            0,
            [],
            stats["slots"]["total"],
        ), (stats["rooms"], about(node, "/rooms")["live"])
    assert 200 in [serve(nodes) for _ in range(5)]
