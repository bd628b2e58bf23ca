"""The real transfer engine over loopback TCP, in processes of its own."""

from __future__ import annotations

import ast
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.errors import SettingsError, TransferFailed
from app.transfer import mooncake
from app.transfer.base import Block, Region, Status
from app.transfer.mooncake import MooncakeDriver, environment, prepare, require_async_api
from tests.transfer.processes import SIZE, Child, child, first_submits, pattern, receive, send

APP = Path(__file__).parents[2] / "app"
_END_THE_PROCESS = ("_on_cuda", "_sync")
_BATCH_STATUS = "get_batch_transfer_status"


@pytest.fixture(scope="module")
def sender() -> Iterator[Child]:
    with child(send) as found:
        yield found


@pytest.fixture(scope="module")
def receiver() -> Iterator[Child]:
    with child(receive) as found:
        yield found


@pytest.mark.contract(101)
def test_bytes_land_in_another_process(sender: Child, receiver: Child) -> None:
    """A write of many descriptors lands whole in a peer's memory, and nothing beside it is touched."""
    session, base, _ = receiver.hello
    [(error, _)], statistics = sender.write((session, base, 4096, 700_001))
    assert error is None
    assert statistics["bytes"] == 700_001
    assert statistics["descriptors"] == 11
    assert sender.hello[1] == "tcp"
    content, expected = receiver.content(), pattern(1)
    assert (content[4096 : 4096 + 700_001] == expected[4096 : 4096 + 700_001]).all()
    assert not content[:4096].any()
    assert not content[4096 + 700_001 :].any()


@pytest.mark.case("F6")
def test_a_killed_peer_fails_alone(sender: Child, receiver: Child) -> None:
    """Writes to a killed peer fail in bounded time; those to another one succeed before, between and after."""
    session, base, _ = receiver.hello
    with child(receive) as victim:
        dead_session, dead_base, _ = victim.hello
        assert sender.write((dead_session, dead_base, 0, 1000))[0][0][0] is None
        assert (victim.content()[:1000] == pattern(1)[:1000]).all()
        victim.process.kill()
        victim.process.join(20)
        for _ in range(2):
            outcomes, statistics = sender.write(
                (dead_session, dead_base, 0, 200_000), (session, base, 0, SIZE)
            )
            (error, seconds), (others_error, _) = outcomes
            assert error is not None
            assert error.startswith("TransferFailed: ")
            assert dead_session in error
            assert seconds < 30
            assert others_error is None
    assert statistics["rebuilds"] == 0
    assert (receiver.content() == pattern(1)).all()


@pytest.mark.case("F6")
def test_a_stopped_peer_hangs_alone(sender: Child, receiver: Child) -> None:
    """A first contact with a stopped process takes the engine a minute: only its own batch waits for it."""
    session, base, _ = receiver.hello
    with child(receive) as victim:
        place = (victim.hello[0], victim.hello[1], 0, 1000)
        assert victim.process.pid is not None
        os.kill(victim.process.pid, signal.SIGSTOP)
        outcomes, _ = sender.write(place, (session, base, 0, 1000), (session, base, 2000, 1000))
        os.kill(victim.process.pid, signal.SIGCONT)
        (error, seconds), *others = outcomes
        assert error is not None
        assert error.startswith("DeadlineExceeded: ")
        assert [other[0] for other in others] == [None, None]
        assert max(other[1] for other in others) < seconds
        assert sender.write(place)[0][0][0] is None


@pytest.mark.case("F6")
def test_after_a_probe_no_submit_waits_for_the_peer() -> None:
    """While the peer's handshakes are held up, a driver that has met it submits at once, one that has not waits."""
    with child(first_submits) as found:
        met, first = found.hello
    assert met < first / 4
    assert first > 1


def test_an_unreachable_peer_fails_at_once(sender: Child, receiver: Child) -> None:
    """A session at which nobody listens is found out before a write is submitted."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    [(error, seconds)], _ = sender.write((f"127.0.0.1:{port}", receiver.hello[1], 0, 1000))
    assert error == f"TransferFailed: 127.0.0.1:{port} does not answer"
    assert seconds < 5


def test_only_the_bound_address_is_served(sender: Child, receiver: Child) -> None:
    """Every listening socket of a process with the engine answers on 127.0.0.1 and on no other address."""
    for _, _, listening in (sender.hello, receiver.hello):
        assert listening
        for bound, port in listening:
            if bound == "127.0.0.1":
                continue
            with socket.create_connection(("127.0.0.1", port), timeout=10):
                pass
            # the engine binds to every interface; a filter drops what is for another address
            with pytest.raises(OSError, match=r"timed out|refused"):
                socket.create_connection(("127.0.0.2", port), timeout=0.3)


class OldEngine:
    """The API of an engine before its asynchronous calls."""

    def initialize(self) -> None: ...

    def register_memory(self) -> None: ...

    def transfer_sync_write(self) -> None: ...


@pytest.mark.contract(102)
def test_an_engine_without_asynchronous_calls_is_refused() -> None:
    """The error names the missing calls and says which version to upgrade to."""
    with pytest.raises(SettingsError) as caught:
        require_async_api(OldEngine)
    assert caught.value.message == (
        "this transfer engine lacks transfer_submit_write, transfer_check_status, send_probe: "
        "upgrade mooncake-transfer-engine to 0.3.13 or newer"
    )


@pytest.mark.contract(102)
def test_no_call_that_may_end_the_process_is_made() -> None:
    """No source file of the application names a waiting, an on-CUDA or a batch-status call of the engine."""
    found = []
    for path in sorted(APP.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node, "attr", None) or getattr(node, "id", None) or getattr(node, "value", None)
            if not isinstance(name, str) or not name.isidentifier():
                continue
            if name == _BATCH_STATUS or name.endswith(_END_THE_PROCESS) or "transfer_sync" in name:
                found.append(f"{path}: {name}")
    assert found == []


class StubEngine:
    """Answers as the real engine does, and records what it is asked."""

    def __init__(self) -> None:
        self.code = 0
        self.asked: list[int] = []
        self.status = 0
        self.empty = 7
        """What a write of no bytes is given for an id."""

    def initialize(self, *arguments: Any) -> int:
        return self.code

    def get_rpc_port(self) -> int:
        return 15001

    def register_memory(self, base: int, length: int) -> int:
        return self.code

    def transfer_submit_write(self, session: str, source: int, destination: int, length: int) -> int:
        return 0 if length else self.empty

    def transfer_check_status(self, submitted: int) -> int:
        self.asked.append(submitted)
        return self.status

    def send_probe(self, session: str) -> int:
        return self.code


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> StubEngine:
    engine = StubEngine()
    monkeypatch.setattr(mooncake, "load_engine_class", lambda: lambda: engine)
    monkeypatch.setattr(mooncake, "confine", lambda address: 0)
    return engine


def test_id_0_is_never_asked_about(stub: StubEngine) -> None:
    """Asking the real engine about 0, the answer of a failed submit, would end the process."""
    driver = MooncakeDriver("127.0.0.1")
    submitted = driver.submit("127.0.0.1:15002", Block(0, 0, 1))
    assert submitted == 0
    with pytest.raises(TransferFailed, match="0 is no transfer"):
        driver.check(submitted)
    assert stub.asked == []
    for code, status in ((0, Status.PENDING), (1, Status.DONE), (-1, Status.FAILED)):
        stub.status = code
        assert driver.check(5) is status


def test_codes_of_the_engine_are_errors(stub: StubEngine) -> None:
    """A failed start and a failed registration raise with the code; a probe that fails is no answer."""
    driver = MooncakeDriver("127.0.0.1")
    assert driver.session == "127.0.0.1:15001"
    stub.status = 1
    assert driver.probe("127.0.0.1:15002")
    stub.code = -102
    assert not driver.probe("127.0.0.1:15002")
    with pytest.raises(TransferFailed, match=r"cannot register pool \(4096 bytes\): code -102"):
        driver.register(Region("pool", 0, 4096))
    with pytest.raises(TransferFailed, match=r"did not start on 127\.0\.0\.1: code -102"):
        MooncakeDriver("127.0.0.1")


def test_a_probe_that_learns_nothing_of_the_peer_is_no_answer(
    stub: StubEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write of no bytes is refused, fails or does not end: the peer has not been met. Id 0 is never asked about."""
    monkeypatch.setattr(mooncake, "_EMPTY_POLL_S", 0.0)
    driver = MooncakeDriver("127.0.0.1")
    stub.empty = 0
    assert not driver.probe("127.0.0.1:15002")
    assert stub.asked == []
    stub.empty = 7
    for status, asked in ((-1, 1), (0, 1000)):
        stub.status, stub.asked = status, []
        assert not driver.probe("127.0.0.1:15002")
        assert stub.asked == [7] * asked


def test_the_environment_cannot_change_after_the_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the engine has been loaded under other values, setting them is an error that names them."""
    values = environment(bind="127.0.0.1", lanes=3, progress_timeout_s=7)
    assert values["MC_TCP_BIND_ADDRESS"] == "127.0.0.1"
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(__import__("sys").modules, "mooncake.engine", SimpleNamespace())
    prepare(values)
    with pytest.raises(SettingsError, match=r"too late to set \['MC_TCP_LANES_PER_PEER'\]"):
        prepare({**values, "MC_TCP_LANES_PER_PEER": "4"})
