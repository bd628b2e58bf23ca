"""Loads from L2: prepared once, one copy a layer, readiness for each layer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from app.errors import BadInput, DeadlineExceeded, IllegalTransition, NotReady, SettingsError, TransferFailed
from app.tiers.copiers import DirectBackend, KernelBackend
from app.tiers.copy_faults import CopyFault
from app.tiers.copy_queue import CopyQueue
from app.tiers.descriptors import LayerCopy, PagePairs
from app.tiers.prepared import LayerReadiness, PreparedLoadDescriptor, start_load
from app.tiers.tickets import CopyTicket
from tests.conftest import Track
from tests.tiers.rig import (
    PAIRS,
    SHARED_LAYER,
    WAIT_S,
    Gate,
    GatedBackend,
    RecordingBackend,
    Tiers,
    pages,
    tiers,
)

BATCH = PagePairs.of([(pages(2, 3, 4), pages(7, 8, 5)), (pages(0), pages(1))])
COPIES = [(0, "target"), (1, "target"), (2, "target"), (3, "target"), (3, "draft"), (4, "draft")]


def fill_l2(rig: Tiers) -> None:
    """Put what L1 holds of the batch into L2, and overwrite L1."""
    for name, held in rig.before[0].items():
        rig.l2_bytes(name)[:, BATCH.l2] = held[:, BATCH.l1]
    rig.forget()


def is_loaded(rig: Tiers, name: str, slot: int) -> bool:
    held = rig.before[0][name][slot, BATCH.l1]
    return bool(np.array_equal(rig.l1_bytes(name)[slot, BATCH.l1], held))


class Waiting:
    """A thread in an accessor: `over` once it has returned, `error` what it raised."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.over = threading.Event()
        self.error: BaseException | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self.error = error
        self.over.set()


@pytest.mark.contract(71)
@pytest.mark.contract(69)
@pytest.mark.parametrize(("layout", "making"), PAIRS)
def test_a_load_is_built_once_and_submitted_layer_by_layer(layout: str, making: type, track: Track) -> None:
    """However many layers: one mapping, used by every layer as the same object, one copy for each source of a layer."""
    with tiers(layout, making()) as rig, track(CopyQueue(rig.copier)) as queue:  # type: ignore[arg-type]
        fill_l2(rig)
        descriptor = PreparedLoadDescriptor.begin(rig.copier, BATCH, batch=1)
        readiness = track(start_load(descriptor, queue, deadline_s=WAIT_S))
        queue.drain(WAIT_S)
        assert [(t.copy.layer, t.copy.source) for t in readiness.tickets] == COPIES
        assert len({id(t.copy.mapping) for t in readiness.tickets}) == 1
        assert descriptor.builds == rig.copier.statistics.steps["build"] == 1
        assert rig.copier.statistics.submits == {("load", "target"): 4, ("load", "draft"): 2}
        assert descriptor.ended
        for name, held in rig.before[0].items():
            assert all(is_loaded(rig, name, slot) for slot in range(len(held)))


@pytest.mark.contract(72)
def test_a_descriptor_is_of_no_use_after_its_end(track: Track) -> None:
    """After the end no layer is made of it, a copy that was made before is refused at submission, nothing moves."""
    with tiers() as rig, track(CopyQueue(rig.copier)) as queue:
        fill_l2(rig)
        with PreparedLoadDescriptor.begin(rig.copier, BATCH, batch=6) as descriptor:
            kept = descriptor.layer("target", 0, batch=6)
        for use in (
            lambda: descriptor.layer("target", 1, batch=6),
            lambda: queue.submit(kept),
            lambda: start_load(descriptor, queue, deadline_s=1.0),
        ):
            with pytest.raises(IllegalTransition, match="the prepared load of batch 6 has ended"):
                use()
        descriptor.end()
        queue.drain(WAIT_S)
        assert queue.submitted == 0
        assert (rig.l1_bytes("target.kv") == 0xEE).all()


@pytest.mark.contract(72)
def test_a_descriptor_serves_its_own_batch() -> None:
    """A layer that is asked for in the name of another batch is refused, with both numbers."""
    with tiers() as rig, PreparedLoadDescriptor.begin(rig.copier, BATCH, batch=6) as descriptor:
        with pytest.raises(IllegalTransition, match="of batch 6 was used for batch 7"):
            descriptor.layer("target", 0, batch=7)
        assert descriptor.layer("target", 0, batch=6).mapping is not None


@pytest.mark.contract(69)
def test_a_layer_is_loaded_once() -> None:
    """A second copy of a layer in one load is our own fault, and one that nobody stores is refused."""
    with tiers() as rig, PreparedLoadDescriptor.begin(rig.copier, BATCH, batch=6) as descriptor:
        descriptor.layer("target", 2, batch=6)
        with pytest.raises(IllegalTransition, match="target layer 2 of batch 6 is loaded already"):
            descriptor.layer("target", 2, batch=6)
        with pytest.raises(BadInput, match="no draft buffer of layer 2"):
            descriptor.layer("draft", 2, batch=6)


@pytest.mark.contract(71)
def test_copies_in_the_queue_outlive_the_end(track: Track) -> None:
    """Ending a load releases its mapping for new layers; what was submitted keeps what it needs."""
    with tiers() as rig, track(CopyQueue(rig.copier)) as queue:
        fill_l2(rig)
        gate = Gate()
        descriptor = PreparedLoadDescriptor.begin(rig.copier, BATCH, batch=1)
        start_load(descriptor, queue, deadline_s=WAIT_S, after=[gate])
        assert gate.awaited.wait(WAIT_S)
        assert descriptor.ended
        gate.happen()
        queue.drain(WAIT_S)
        assert is_loaded(rig, "target.kv", 3)


@pytest.mark.contract(73)
def test_a_backend_without_prepared_loads_is_a_logged_fallback(track: Track) -> None:
    """Then each load logs a warning that names the backend, and the mapping is built for every layer."""
    with (
        tiers("layer_first", RecordingBackend(prepared=False)) as rig,
        track(CopyQueue(rig.copier)) as queue,
    ):
        fill_l2(rig)
        for batch in (1, 2):
            with capture_logs() as logs:
                descriptor = PreparedLoadDescriptor.begin(rig.copier, BATCH, batch=batch)
            (line,) = logs
            assert line == {
                "event": "no prepared loads: built for each layer",
                "log_level": "warning",
                "backend": "recording",
                "batch": batch,
            }
            start_load(descriptor, queue, deadline_s=WAIT_S)
            queue.drain(WAIT_S)
            assert descriptor.builds == 0
            assert rig.copier.statistics.steps["build"] == batch * len(COPIES)
        assert is_loaded(rig, "target.kv", 3)


@pytest.mark.contract(73)
def test_strict_refuses_the_fallback() -> None:
    """With the strict setting a backend without prepared loads is an error that names both, and no warning."""
    with tiers("layer_first", RecordingBackend(prepared=False)) as rig, capture_logs() as logs:
        with pytest.raises(SettingsError) as caught:
            PreparedLoadDescriptor.begin(rig.copier, BATCH, batch=1, strict=True)
        assert caught.value.message == "hicache.strict: the copy backend recording has no prepared loads"
        assert logs == []
    for making in (DirectBackend, KernelBackend):
        with tiers("layer_first", making()) as rig:
            assert PreparedLoadDescriptor.begin(rig.copier, BATCH, batch=1, strict=True).builds == 1


@pytest.mark.case("G1")
@pytest.mark.contract(74)
def test_an_accessor_blocks_until_kv_and_state_of_its_layer_are_there(track: Track) -> None:
    """The state of layer 3 is read at once: it blocks while only the KV has landed, and later layers may be missing."""
    gate = Gate()
    backend = GatedBackend("target.index", gate, layer_slot=1)
    with tiers("layer_first", backend) as rig, track(CopyQueue(rig.copier)) as queue:
        fill_l2(rig)
        descriptor = PreparedLoadDescriptor.begin(rig.copier, BATCH, batch=1)
        readiness = track(start_load(descriptor, queue, deadline_s=WAIT_S, sources=["target"]))
        assert gate.awaited.wait(WAIT_S)
        accessor = Waiting(lambda: readiness.wait(3))
        for earlier in (0, 1, 2):
            readiness.wait(earlier)
            assert readiness.ready(earlier)
            assert is_loaded(rig, "target.kv", earlier)
        assert is_loaded(rig, "target.kv", 3)
        assert not is_loaded(rig, "target.index", 1)
        assert not accessor.over.wait(0.05)
        assert not readiness.ready(3)
        gate.happen()
        assert accessor.over.wait(WAIT_S)
        assert accessor.error is None
        assert is_loaded(rig, "target.index", 1)


@pytest.mark.contract(74)
@pytest.mark.contract(69)
def test_the_first_layer_opens_while_later_ones_are_held_up(track: Track) -> None:
    """Nothing waits for all layers: a forward can read layer 0 when only layer 0 is there."""
    held = threading.Event()

    def plan(copy: LayerCopy) -> CopyFault | None:
        if copy.layer == 1:
            held.wait(WAIT_S)
        return None

    with tiers() as rig, track(CopyQueue(rig.copier, faults=plan)) as queue:
        fill_l2(rig)
        descriptor = PreparedLoadDescriptor.begin(rig.copier, BATCH, batch=1)
        readiness = start_load(descriptor, queue, deadline_s=WAIT_S)
        readiness.wait(0)
        assert is_loaded(rig, "target.kv", 0)
        assert [readiness.ready(layer) for layer in range(5)] == [True, False, False, False, False]
        held.set()
        readiness.wait(4)
        assert [readiness.ready(layer) for layer in range(5)] == [True] * 5


@pytest.mark.contract(74)
def test_waits_are_timed() -> None:
    """Each wait of an accessor reaches the timing hook, so that what a load costs the forward can be shown."""
    heard: list[str] = []
    with tiers() as rig, CopyQueue(rig.copier) as queue:
        rig.copier.statistics.timing = lambda phase, _: heard.append(phase)
        fill_l2(rig)
        readiness = start_load(
            PreparedLoadDescriptor.begin(rig.copier, BATCH, batch=1), queue, deadline_s=WAIT_S
        )
        for layer in range(5):
            readiness.wait(layer)
        queue.drain(WAIT_S)
        assert {phase: heard.count(phase) for phase in heard} == {"build": 1, "submit": 6, "wait": 5}


def test_a_layer_of_both_models_opens_after_both(track: Track) -> None:
    """A layer that target and draft store is not ready while the draft's copy is missing."""

    def plan(copy: LayerCopy) -> CopyFault | None:
        return CopyFault(lost=True) if copy.source == "draft" else None

    with tiers() as rig, track(CopyQueue(rig.copier, faults=plan)) as queue:
        fill_l2(rig)
        readiness = start_load(
            PreparedLoadDescriptor.begin(rig.copier, BATCH, batch=1), queue, deadline_s=0.2
        )
        readiness.wait(2)
        with pytest.raises(
            DeadlineExceeded, match=f"layer {SHARED_LAYER} was not loaded within 0.2 s"
        ) as caught:
            readiness.wait(SHARED_LAYER)
        assert caught.value.layer == SHARED_LAYER


def test_the_error_of_a_copy_is_what_its_accessor_raises(track: Track) -> None:
    """A failed layer raises in its accessor, and other layers stay readable."""
    error = TransferFailed("bad page", layer=1)

    def plan(copy: LayerCopy) -> CopyFault | None:
        return CopyFault(error=error) if copy.layer == 1 else None

    with tiers() as rig, track(CopyQueue(rig.copier, faults=plan)) as queue:
        fill_l2(rig)
        readiness = start_load(
            PreparedLoadDescriptor.begin(rig.copier, BATCH, batch=1), queue, deadline_s=WAIT_S
        )
        with pytest.raises(TransferFailed) as caught:
            readiness.wait(1)
        assert caught.value is error
        readiness.wait(2)
        assert not readiness.ready(1)
        assert readiness.failure is None


def test_a_load_whose_submission_fails_holds_up_no_accessor(track: Track) -> None:
    """When the queue closes half-way, accessors of missing layers raise at once and the tickets so far are known."""
    with tiers() as rig:
        fill_l2(rig)
        queue = track(CopyQueue(rig.copier))
        calls: list[LayerCopy] = []
        submit: Callable[..., CopyTicket] = queue.submit

        def closing(copy: LayerCopy, **kwargs: Any) -> CopyTicket:
            calls.append(copy)
            if len(calls) == 3:
                queue.close()
            return submit(copy, **kwargs)

        queue.submit = closing
        readiness = start_load(
            PreparedLoadDescriptor.begin(rig.copier, BATCH, batch=1), queue, deadline_s=WAIT_S
        )
        assert len(readiness.tickets) == 2
        assert all(ticket.quiet for ticket in readiness.tickets)
        assert isinstance(readiness.failure, NotReady)
        with pytest.raises(NotReady, match="is closed"):
            readiness.wait(4)


def test_an_announced_copy_that_never_comes_ends_at_the_deadline() -> None:
    """An accessor that is there before the copies waits for them, and not for ever; other layers are open."""
    readiness = LayerReadiness([("target", 1)], deadline_s=0.05)
    readiness.wait(0)
    assert readiness.ready(0)
    assert not readiness.ready(1)
    with pytest.raises(DeadlineExceeded, match=r"layer 1 was not loaded within 0\.05 s"):
        readiness.wait(1)
    accessor = Waiting(lambda: LayerReadiness([("target", 1)], deadline_s=WAIT_S).wait(1))
    assert not accessor.over.wait(0.02)


def test_an_accessor_that_is_early_gets_the_copy_that_comes(track: Track) -> None:
    """A wait that began before its copy was submitted ends with the copy."""
    readiness = track(LayerReadiness([("target", 0)], deadline_s=WAIT_S))
    accessor = Waiting(lambda: readiness.wait(0))
    with tiers() as rig, track(CopyQueue(rig.copier)) as queue:
        copy = LayerCopy(direction="load", source="target", layer=0, pairs=BATCH)
        assert not accessor.over.wait(0.02)
        ticket = queue.submit(copy)
        readiness.add(ticket)
        assert accessor.over.wait(WAIT_S)
        assert accessor.error is None
        for wrong in (ticket, CopyTicket(LayerCopy(direction="load", source="draft", layer=4, pairs=BATCH))):
            with pytest.raises(BadInput, match="was announced"):
                readiness.add(wrong)


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, float("inf"), float("nan")])
def test_a_wait_has_a_finite_deadline(deadline_s: float) -> None:
    """No accessor can wait without end."""
    with pytest.raises(BadInput, match="finite deadline"):
        LayerReadiness([], deadline_s=deadline_s)
