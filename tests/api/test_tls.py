"""HTTPS between nodes and to their clients, with certificates of a CA that the test makes."""

from __future__ import annotations

import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import anyio
import httpx
import pytest

from app.errors import SettingsError
from app.settings import load_settings
from demo.cluster import Cluster, NodeProcess, cluster
from tests.api.test_bad_input import require_problem
from tests.support.legs import body_for, wait_free


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=60)


def certify(folder: Path, name: str, address: str = "IP:127.0.0.1") -> None:
    """`name`.pem and `name`.key: a certificate for an address that nobody else has signed."""
    openssl(
        folder, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
        "-days", "2", "-subj", f"/CN={name}", "-addext", f"subjectAltName={address}",
        "-keyout", f"{name}.key", "-out", f"{name}.pem",
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("certificates")
    certify(made, "node")
    certify(made, "other")
    certify(made, "elsewhere", "DNS:elsewhere.example")
    return made


def tls(folder: Path, own: str, trusted: str) -> list[str]:
    """Flags of a node with its own certificate, and of whom it trusts."""
    return [
        "--http.tls-cert", str(folder / f"{own}.pem"), "--http.tls-key", str(folder / f"{own}.key"),
        "--http.tls-ca", str(folder / f"{trusted}.pem"),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def nodes(folder: Path) -> Iterator[Cluster]:
    """A prefill node, one with a certificate for another name, and two decode nodes; the second trusts nobody here."""
    with cluster(
        folder,
        flags=["--model.name", "toy"],
        prefill_flags=(tls(folder, "node", "node"), tls(folder, "elsewhere", "node")),
        decode_flags=(tls(folder, "node", "node"), tls(folder, "node", "other")),
        router=False,
    ) as running:
        yield running


async def ask(nodes: tuple[NodeProcess, NodeProcess], trusted: ssl.SSLContext) -> httpx.Response:
    """Both legs of a request; decode's answer."""
    prefill, decode = nodes
    body = body_for(prefill, list(b"a secret prompt"), new_tokens=3)
    async with httpx.AsyncClient(verify=trusted, timeout=60) as client, anyio.create_task_group() as group:
        group.start_soon(lambda: client.post(f"{prefill.url}/generate", json=body))
        return await client.post(f"{decode.url}/generate", json=body)


async def test_nodes_speak_https(nodes: Cluster, folder: Path) -> None:
    """A request over HTTPS is served by nodes that check each other's certificates, and plain HTTP is not."""
    prefill, decode = nodes.prefill[0], nodes.decode[0]
    assert prefill.url.startswith("https://")
    trusted = ssl.create_default_context(cafile=folder / "node.pem")
    answer = await ask((prefill, decode), trusted)
    assert answer.status_code == 200, answer.text
    await wait_free(prefill, decode)
    async with httpx.AsyncClient(timeout=5) as client:
        with pytest.raises(httpx.HTTPError):
            await client.get(prefill.url.replace("https", "http") + "/livez")
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await client.get(f"{prefill.url}/livez")


@pytest.mark.parametrize("pair", ["unknown", "elsewhere"])
async def test_a_peer_that_cannot_be_checked(nodes: Cluster, folder: Path, pair: str) -> None:
    """A certificate of another CA, or for another name, ends the call before a message or token goes over it."""
    prefill = nodes.prefill[1 if pair == "elsewhere" else 0]
    decode = nodes.decode[1 if pair == "unknown" else 0]
    body = body_for(prefill, [65])
    known = prefill.get("/stats")["peers"]["known"]
    async with httpx.AsyncClient(verify=False, timeout=60) as client:
        answer = await client.post(f"{decode.url}/generate", json=body)
        document = require_problem(answer, 503, "peer-unavailable")
        assert "certificate" in document["detail"].lower()
    assert prefill.get("/stats")["peers"]["known"] == known
    await wait_free(decode)


def test_keys_that_do_not_fit(folder: Path) -> None:
    """Another certificate's key, and a CA file without a certificate, stop the start and are named."""
    fit = ["--http.tls-cert", str(folder / "node.pem"), "--http.tls-key"]
    with pytest.raises(SettingsError, match=r"http\.tls_cert or http\.tls_key"):
        load_settings(flags=["--role", "decode", *fit, str(folder / "other.key")])
    with pytest.raises(SettingsError, match=r"http\.tls_ca"):
        load_settings(
            flags=[
                "--role",
                "decode",
                *fit,
                str(folder / "node.key"),
                "--http.tls-ca",
                str(folder / "node.key"),
            ]
        )


def test_a_key_with_a_password(folder: Path) -> None:
    """A key that is encrypted is refused; nobody is asked for its password."""
    openssl(folder, "ec", "-aes256", "-passout", "pass:x", "-in", "node.key", "-out", "locked.key")
    flags = ["--http.tls-cert", str(folder / "node.pem"), "--http.tls-key", str(folder / "locked.key")]
    with pytest.raises(SettingsError, match=r"http\.tls_cert or http\.tls_key"):
        load_settings(flags=["--role", "decode", *flags])
