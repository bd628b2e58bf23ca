"""What `python -m app doctor` finds on a machine."""

from __future__ import annotations

import ctypes
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from app import doctor
from app.cli import main
from app.core.geometry import CacheGeometry
from app.doctor import Finding, examine
from app.engine.models import files as models
from app.engine.models.toy import ToyEngine
from app.errors import SettingsError
from app.obs.cgroups import cgroup_limit
from app.settings import NodeSettings, load_settings
from app.tiers.device import DevicePool

TOY = {"role": "prefill", "model": {"name": "toy"}}
CONFIG = {"num_hidden_layers": 30, "num_key_value_heads": 3, "head_dim": 64}


def settings(**sections: object) -> NodeSettings:
    return load_settings(overrides={**TOY, **sections})


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def one(findings: list[Finding]) -> Finding:
    (finding,) = findings
    return finding


# ---------------------------------------------------------------------- the whole


def test_a_good_machine_passes_and_exits_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    """Every check prints one line, the transport that moved bytes among them."""
    assert main(["doctor", "--role", "prefill", "--model.name", "toy"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line[6:].partition(":")[0] for line in lines]
    assert names[:9] == [
        "libraries",
        "http port",
        "http address",
        "device",
        "model",
        "memory",
        "shared memory",
        "locked memory",
        "transfer engine",
    ]
    assert any(line.startswith("ok    transport: tcp: a write has landed") for line in lines)
    assert not any(line.startswith("FAIL") for line in lines)
    assert lines[-1] == "ok    data port: the engine serves 127.0.0.1 only, and asks nobody for a token"


def test_one_failure_exits_with_1(taken: int, capsys: pytest.CaptureFixture[str]) -> None:
    """A failed check is printed, the others still run, and the status says it."""
    assert main(["doctor", "--role", "prefill", "--model.name", "toy", "--http.port", str(taken)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("FAIL")] == [
        f"FAIL  http port: 127.0.0.1:{taken}: Address already in use"
    ]
    assert lines[-1].startswith("ok    data port")


async def test_a_check_that_breaks_is_a_failure_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unforeseen error in a check is a finding of its own."""

    def broken(_: NodeSettings) -> list[Finding]:
        raise RuntimeError("no such luck")

    async def quick(_: NodeSettings) -> list[Finding]:
        return []

    monkeypatch.setattr(doctor, "device", broken)
    monkeypatch.setattr(doctor, "transport", quick)
    findings = await examine(settings())
    assert [f.line() for f in findings if not f.good] == [
        "FAIL  device: the check itself failed: RuntimeError: no such luck"
    ]
    assert findings[-1].name == "locked memory"


# ---------------------------------------------------------------------- libraries and network


def test_a_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line names every library that does not load, and Debian's packages for these only."""
    load = ctypes.CDLL

    def partly(name: str) -> ctypes.CDLL:
        if name == "libcurl.so.4":
            return load(name)
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", partly)
    found = one(doctor.libraries(settings()))
    assert not found.good
    assert found.detail == (
        "libibverbs.so.1, libnuma.so.1 not found; on Debian: apt-get install libibverbs1 libnuma1"
    )


def test_a_taken_port_is_only_a_note_where_any_will_do(taken: int) -> None:
    """http.port_taken = any makes a taken port no failure."""
    found = one(doctor.http_port(settings(http={"port": taken, "port_taken": "any"})))
    assert (found.good, found.note) == (True, True)
    assert found.line().startswith(f"note  http port: 127.0.0.1:{taken}: Address already in use")


def test_a_port_that_was_checked_is_free_again() -> None:
    """The check itself keeps no port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    for _ in range(2):
        assert one(doctor.http_port(settings(http={"port": port}))).line() == (
            f"ok    http port: 127.0.0.1:{port} is free"
        )


def test_an_address_of_another_machine_is_a_failure() -> None:
    """A host that this machine does not have cannot be listened on."""
    foreign = settings(http={"host": "203.0.113.7"}, auth={"token": "t"})
    assert not one(doctor.http_port(foreign)).good


async def test_an_advertised_name_that_does_not_resolve_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers could reach neither HTTP nor the engine: the name's check and the transport's both say so."""
    lost = settings(http={"advertise": "nowhere.invalid"})
    found = one(doctor.http_address(lost))
    assert not found.good
    assert "nowhere.invalid" in found.detail
    assert "http.advertise" in found.detail
    findings = await doctor.transport(lost)
    assert [f.name for f in findings if not f.good] == ["transport"]
    assert "nowhere.invalid" in findings[-1].detail


# ---------------------------------------------------------------------- model and memory


def converted(folder: Path, weights_bytes: int) -> None:
    """A converted model as far as the checks look at it."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(weights_bytes)


def test_a_model_without_folder_and_package_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither converted nor installed: a node could not start, and the line names both places."""
    monkeypatch.setenv("KVFERRY_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(models._PACKAGES, "smollm2", ("no_such_package", "weights.gguf"))
    found = one(doctor.model(settings(model={"name": "smollm2"})))
    assert not found.good
    assert str(tmp_path) in found.detail
    assert "no_such_package" in found.detail


def test_a_model_that_is_not_converted_yet_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package alone is enough, but the first start takes longer and memory is not known."""
    monkeypatch.setenv("KVFERRY_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(models._PACKAGES, "smollm2", ("json", "weights.gguf"))
    chosen = settings(model={"name": "smollm2"})
    assert one(doctor.model(chosen)).line().startswith("note  model: smollm2: not converted yet")
    assert one(doctor.memory(chosen)).note
    converted(tmp_path / "smollm2-v1", 10)
    assert one(doctor.model(chosen)).line() == f"ok    model: smollm2: {tmp_path / 'smollm2-v1'}"


@pytest.mark.parametrize(("dtype", "item_bytes"), [("auto", 4), ("float32", 4), ("bfloat16", 2)])
def test_pools_are_sized_without_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, item_bytes: int
) -> None:
    """A real model's pool follows from its config and the dtype; weights grow where they are widened."""
    monkeypatch.setenv("KVFERRY_CACHE_DIR", str(tmp_path))
    converted(tmp_path / "smollm2-v1", 1000)
    chosen = settings(model={"name": "smollm2", "dtype": dtype}, cache={"pages": 64, "page_size": 64})
    geometry = doctor.geometry_of(chosen)
    assert isinstance(geometry, CacheGeometry)
    assert geometry.pool_bytes(64) == 30 * 64 * 64 * 2 * 3 * 64 * item_bytes
    assert doctor._weights_bytes(chosen) == 1000 * item_bytes // 2


def test_the_sized_pool_is_the_one_that_a_node_makes() -> None:
    """The check counts what the device pool really takes, slots included."""
    chosen = settings(cache={"pages": 70, "slots": 9})
    with DevicePool(ToyEngine(page_size=64).geometry, 70, 9) as pool:
        assert doctor._pool_bytes(chosen) == pool.total_bytes


def test_pools_over_the_control_groups_limit_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line names the setting, what is needed and the limit."""
    monkeypatch.setattr(doctor, "cgroup_limit", lambda: 410 << 20)
    assert one(doctor.memory(settings(cache={"pages": 64}))).good
    found = one(doctor.memory(settings(cache={"pages": 512})))
    assert not found.good
    assert "cache.pages = 512" in found.detail
    assert "cgroup limit 410.0 MiB" in found.detail


def test_pools_over_the_available_memory_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a limit of a control group the machine's memory decides."""
    monkeypatch.setattr(doctor, "cgroup_limit", lambda: None)
    pages = psutil.virtual_memory().total // (64 * 64 * 12)
    found = one(doctor.memory(settings(cache={"pages": pages})))
    assert not found.good
    assert "cgroup limit none" in found.detail


def test_the_limit_is_the_smallest_on_the_way_up_v2(tmp_path: Path) -> None:
    """A group is bound by its own limit and by those above it."""
    member, root = tmp_path / "cgroup", tmp_path / "fs"
    (root / "pod" / "node").mkdir(parents=True)
    member.write_text("0::/pod/node\n")
    assert cgroup_limit(member, root) is None
    (root / "pod" / "node" / "memory.max").write_text("max\n")
    (root / "pod" / "memory.max").write_text("5000\n")
    assert cgroup_limit(member, root) == 5000
    (root / "pod" / "node" / "memory.max").write_text("4000\n")
    assert cgroup_limit(member, root) == 4000


def test_the_limit_is_found_in_v1_and_inside_a_container(tmp_path: Path) -> None:
    """v1 has a mount a controller and a huge number for none; a container sees its group at the mount."""
    member, root = tmp_path / "cgroup", tmp_path / "fs"
    (root / "memory").mkdir(parents=True)
    member.write_text("7:cpu,cpuacct:/elsewhere\n4:memory:/docker/0123\n0::/\n")
    limit = root / "memory" / "memory.limit_in_bytes"
    limit.write_text("9223372036854771712\n")
    assert cgroup_limit(member, root) is None
    limit.write_text("123456\n")
    assert cgroup_limit(member, root) == 123456


def test_no_control_group_is_no_limit(tmp_path: Path) -> None:
    """A machine without control groups passes."""
    assert cgroup_limit(tmp_path / "absent", tmp_path) is None


def test_shared_memory_that_is_forbidden_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU pools need a memfd; a sandbox may forbid it."""

    def forbidden(name: str, flags: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", forbidden)
    found = one(doctor.shared_memory(settings()))
    assert not found.good
    assert "Operation not permitted" in found.detail


# ---------------------------------------------------------------------- transfer engine


async def test_an_engine_that_hangs_is_ended_at_the_limit() -> None:
    """The check has a time limit of its own and leaves no process behind."""
    before = {p.pid for p in psutil.Process().children()}
    found = one(await doctor.transport(settings(), limit_s=0.001))
    assert not found.good
    assert "within 0.001 s" in found.detail
    assert {p.pid for p in psutil.Process().children()} <= before


def test_an_engine_that_ends_its_process_is_a_failure() -> None:
    """The engine may kill whoever loads it: the check reports the status."""
    found = one(doctor._judge(b"", -11))
    assert found.line() == "FAIL  transfer engine: its process ended with -11 and without an answer"


async def test_a_data_port_for_everybody_is_a_note() -> None:
    """A node that listens everywhere has its engine's port open as well, which no token guards."""
    everywhere = settings(http={"host": "0.0.0.0", "advertise": "localhost"}, auth={"token": "t"})
    *_, found = await doctor.transport(everywhere)
    assert (found.good, found.note, found.name) == (True, True, "data port")
    assert "0.0.0.0" in found.detail


def test_an_engine_that_does_not_load_says_why() -> None:
    """What the loader says is shown, and no transport is claimed."""
    answer = json.dumps({"stage": "load", "error": "cannot load the transfer engine: no libibverbs"})
    assert one(doctor._judge(answer.encode(), 0)).line() == (
        "FAIL  transfer engine: cannot load the transfer engine: no libibverbs"
    )


def test_settings_still_come_first() -> None:
    """Checks run on valid settings only."""
    with pytest.raises(SettingsError, match="role"):
        load_settings(overrides={"model": {"name": "toy"}})
