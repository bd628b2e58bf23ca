"""Who may call what: tokens and their scopes, on every route that the OpenAPI document lists."""

from __future__ import annotations

import ast
import json
import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from app.api.auth import Tokens, needed
from app.api.document import openapi_document
from app.errors import Denied, ScopeMissing, SettingsError, TokenMissing, TokenWrong
from app.settings import load_settings
from app.settings.credentials import Scope, peer_secret, scopes
from demo.cluster import NodeProcess, cluster
from tests.api.test_bad_input import require_problem
from tests.conftest import Track
from tests.support.harness import Cluster, prompt_of
from tests.support.legs import body_for

ROOT = Path(__file__).parents[2]
TOKENS = {name: f"{name}-{secrets.token_hex(8)}" for name in ("token", "read", "request", "peer")}
GOOD_FOR = {
    Scope.READ: {"token", "read"},
    Scope.REQUEST: {"token", "request"},
    Scope.PEER: {"peer"},
    Scope.ADMIN: {"token"},
}
OPEN = {"/livez", "/readyz", "/health", "/server_info", "/model_info", "/v1/models"}


def routes() -> Iterator[tuple[str, str]]:
    """Every route of the document, with a room in place of its parameter."""
    for path, methods in json.loads(openapi_document())["paths"].items():
        for method in methods:
            yield method.upper(), path.replace("{room}", "1")


@pytest.fixture
async def guarded(track: Track) -> AsyncIterator[Cluster]:
    """A node of each role with four tokens."""
    auth = {
        "token": TOKENS["token"],
        "read_token": TOKENS["read"],
        "request_token": TOKENS["request"],
        "peer_token": TOKENS["peer"],
    }
    made: Cluster = track(Cluster())
    yield await made.start({"auth": auth}, {"auth": auth})
    await made.close()


async def call(
    cluster: Cluster, method: str, path: str, token: str | None, body: Any = None, *, scheme: str = "Bearer"
) -> list[httpx.Response]:
    """What both nodes answer to a call with a token."""
    headers = {} if token is None else {"authorization": f"{scheme} {token}"}
    found = []
    for node in cluster.nodes:
        transport = httpx.ASGITransport(app=cluster.apps[node], raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url=node.url) as client:
            found.append(await client.request(method, path, headers=headers, json=body))
    return found


def state(cluster: Cluster) -> list[Any]:
    """What a call could have changed."""
    shown = []
    for node in cluster.nodes:
        stats = node.statistics()
        keys = ("pages", "slots", "rooms", "holds", "tombstones", "peers", "forwards", "chunks")
        shown.append({key: stats.get(key) for key in keys})
    return shown


@pytest.mark.case("O2", "O4")
@pytest.mark.parametrize(("method", "path"), [r for r in routes() if r[1] not in OPEN])
async def test_every_route_wants_its_token(guarded: Cluster, method: str, path: str) -> None:
    """401 without a token, 403 with a wrong one or one of another scope, and nothing has changed after any of them."""
    before = state(guarded)
    for answer in await call(guarded, method, path, None, {}):
        require_problem(answer, 401, "token-missing")
        assert answer.headers["www-authenticate"] == "Bearer"
    for answer in await call(guarded, method, path, TOKENS["token"], {}, scheme="Basic"):
        require_problem(answer, 401, "token-missing")
    for answer in await call(guarded, method, path, "x" * 16, {}):
        require_problem(answer, 403, "token-wrong")
    scope = needed(method, path)
    assert scope is not None
    assert (method == "GET") == (scope is Scope.READ)
    for name in set(TOKENS) - GOOD_FOR[scope]:
        for answer in await call(guarded, method, path, TOKENS[name], {}):
            assert require_problem(answer, 403, "scope-missing")["scope"] == scope
    assert state(guarded) == before
    for name in GOOD_FOR[scope]:
        # refused for what is in it, or served: not for who sends it
        for answer in await call(guarded, method, path, TOKENS[name], {}):
            assert answer.status_code not in (401, 403), answer.text


@pytest.mark.parametrize("path", sorted(OPEN))
async def test_what_probes_ask_is_open(guarded: Cluster, path: str) -> None:
    """Health and what routers ask about a node answer without a token."""
    for answer in await call(guarded, "GET", path, None):
        assert answer.status_code == 200, answer.text


@pytest.mark.case("O4")
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/cache/of/tomorrow"),
        ("DELETE", "/livez"),
        ("PUT", "/generate"),
        ("GET", "/nothing"),
        ("GET", "/openapi.json"),
        ("POST", "//v1/peer/handshake"),
        ("POST", "/v1/peer/%2e%2e/abort/1"),
    ],
)
async def test_what_is_not_listed_is_closed(guarded: Cluster, method: str, path: str) -> None:
    """A route that nobody has given a scope, and a path written in another way, want the token as well."""
    for answer in await call(guarded, method, path, None):
        require_problem(answer, 401, "token-missing")
    for answer in await call(guarded, method, path, TOKENS["request"]):
        require_problem(answer, 403, "scope-missing")


@pytest.mark.case("O2")
async def test_the_token_comes_before_the_body(guarded: Cluster) -> None:
    """Without a token not one byte of a body is read."""
    sent: list[Any] = []
    asked = []

    async def receive() -> dict[str, Any]:
        asked.append(1)
        return {"type": "http.request", "body": b"{", "more_body": True}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/generate",
        "headers": [(b"content-length", b"99999999999")],
        "query_string": b"",
    }
    await guarded.apps[guarded.prefill](scope, receive, send)
    assert sent[0]["status"] == 401
    assert asked == []


@pytest.mark.case("O2")
def test_two_headers_are_refused() -> None:
    """A call with two Authorization headers is refused whatever they say; its reader could take the other one."""
    node = load_settings(overrides={"role": "prefill"})
    assert scopes(node.auth) == {}
    tokens = Tokens({"secret": frozenset({Scope.READ})})
    tokens.require(b"bearer secret ", Scope.READ)
    with pytest.raises(ScopeMissing) as narrow:
        tokens.require(b"Bearer secret", Scope.ADMIN)
    assert narrow.value.fields() == {"scope": "admin"}
    for wrong in (b"Bearer secre", b"Bearer secret2", b"Bearer \xff\xfe", b"Bearer SECRET"):
        with pytest.raises(TokenWrong):
            tokens.require(wrong, Scope.READ)
    for none in (None, b"", b"Bearer", b"Bearer  ", b"secret", b"Basic secret"):
        with pytest.raises(TokenMissing):
            tokens.require(none, Scope.READ)


async def test_more_than_one_header(guarded: Cluster) -> None:
    """Two Authorization headers, one of them right, are 401."""
    transport = httpx.ASGITransport(app=guarded.apps[guarded.prefill])
    headers = [("authorization", f"Bearer {TOKENS['token']}"), ("authorization", "Bearer x")]
    async with httpx.AsyncClient(transport=transport, base_url=guarded.prefill.url) as client:
        require_problem(await client.get("/stats", headers=headers), 401, "token-missing")


@pytest.mark.case("O2", "O4")
@pytest.mark.parametrize("with_peer_token", [False, True])
async def test_without_a_peer_token_the_first_one_is_it(track: Track, with_peer_token: bool) -> None:
    """The operators' token opens the routes of peers only where peers have none of their own."""
    auth = {"token": TOKENS["token"]} | ({"peer_token": TOKENS["peer"]} if with_peer_token else {})
    made: Cluster = track(Cluster())
    await made.start({"auth": auth}, {"auth": auth})
    assert peer_secret(made.prefill.settings.auth) == TOKENS["peer" if with_peer_token else "token"]
    for answer in await call(made, "POST", "/v1/peer/handshake", TOKENS["token"], {}):
        assert answer.status_code == (403 if with_peer_token else 422)
    await made.close()


@pytest.mark.case("O2")
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--auth.read-token", "r"], ["auth.read_token", "auth.token"]),
        (["--auth.peer-token", "p"], ["auth.peer_token", "auth.token"]),
        (["--auth.token", "t", "--auth.read-token", "t"], ["token, read_token", "one token"]),
        (["--auth.token", "t", "--auth.peer-token", " "], ["auth.peer_token", "visible ASCII"]),
        (["--auth.token", "t", "--auth.read-token-file", "/nowhere"], ["auth.read_token_file"]),
        (
            ["--auth.token", "t", "--auth.read-token", "r", "--auth.read-token-file", "/dev/null"],
            ["auth.read_token and auth.read_token_file"],
        ),
        (["--http.host", "192.0.2.1", "--auth.read-token", "r"], ["http.host", "auth.token"]),
        (["--http.tls-cert", "a"], ["http.tls_cert", "http.tls_key"]),
        (["--http.tls-ca", "a"], ["http.tls_ca", "http.tls_cert"]),
        (["--http.tls-cert", "/nowhere", "--http.tls-key", "/nowhere"], ["http.tls_cert"]),
        (["--limits.bootstrap-hosts", '["10.0.0.1/8"]'], ["limits.bootstrap_hosts", "10.0.0.1/8"]),
    ],
)
def test_halves_do_not_start(flags: list[str], words: list[str]) -> None:
    """Tokens or certificates that would protect half of a node stop its start and are named, without their value."""
    with pytest.raises(SettingsError) as refused:
        load_settings(flags=["--role", "prefill", *flags])
    assert all(word in refused.value.message for word in words), refused.value.message


@pytest.mark.case("O2")
def test_the_document_names_the_scopes() -> None:
    """The OpenAPI document says for each route which scope it needs, and of six that they need none."""
    document = json.loads(openapi_document())
    assert document["components"]["securitySchemes"]["token"]["scheme"] == "bearer"
    free = set()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            scope = needed(method.upper(), path)
            if scope is None:
                free.add(path)
                assert "security" not in operation
            else:
                assert operation["security"] == [{"token": [scope]}]
    assert free == OPEN


@pytest.mark.case("O1")
def test_nothing_reads_pickles() -> None:
    """No module of the service imports a format that runs code when it is read, or evaluates text."""
    found = []
    for path in sorted((ROOT / "app").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Call):
                names = [ast.unparse(node.func)]
            bad = {
                "pickle",
                "marshal",
                "shelve",
                "dill",
                "cloudpickle",
                "joblib",
                "eval",
                "exec",
                "torch.load",
            }
            found += [f"{path}: {n}" for n in names if n in bad or n.split(".")[0] in bad - {"torch.load"}]
    assert found == []


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[NodeProcess, NodeProcess]]:
    """Two nodes that take their tokens from files and the environment of the system."""
    folder = tmp_path_factory.mktemp("guarded")
    flags = ["--model.name", "toy"]
    for name, key in (("token", "token"), ("request", "request-token"), ("peer", "peer-token")):
        (folder / name).write_text(TOKENS[name] + "\n")
        flags += [f"--auth.{key}-file", str(folder / name)]
    with cluster(folder, flags=flags, router=False) as running:
        yield running.prefill[0], running.decode[0]


@pytest.mark.case("O2")
async def test_a_request_between_guarded_nodes(processes: tuple[NodeProcess, NodeProcess]) -> None:
    """A client with the token for requests is served by nodes that know each other by the peers' token."""
    prefill, decode = processes
    body = body_for(prefill, list(prompt_of(70)))
    headers = {"authorization": f"Bearer {TOKENS['request']}"}
    async with httpx.AsyncClient(headers=headers, timeout=60) as client, anyio.create_task_group() as group:
        group.start_soon(lambda: client.post(f"{prefill.url}/generate", json=body))
        answer = await client.post(f"{decode.url}/generate", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["meta_info"]["completion_tokens"] == 8
    for log in (prefill.log, decode.log):
        assert not any(token in log.read_text() for token in TOKENS.values()), "a token is in the log"


def test_denials_are_one_family() -> None:
    """Every refusal for who asks is a Denied, and none of them tells which tokens there are."""
    assert {e.slug for e in Denied.__subclasses__()} == {
        "token-missing",
        "token-wrong",
        "scope-missing",
        "host-denied",
    }
