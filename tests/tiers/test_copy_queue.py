"""Copies in the background: order, outcomes, faults, and the proof that nothing moves any more."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from structlog.testing import capture_logs

from app.core.ids import Source
from app.errors import BadInput, DeadlineExceeded, IllegalTransition, NotReady, TransferFailed
from app.tiers.copiers import LayerBuffer
from app.tiers.copy_faults import CopyFault
from app.tiers.copy_queue import CopyQueue, submit_all_layers
from app.tiers.descriptors import Direction, LayerCopy, PagePairs, RankPart
from app.tiers.tickets import CopyTicket
from tests.conftest import Track
from tests.tiers.rig import WAIT_S, Gate, RecordingBackend, Tiers, geometry, pages, tiers

PAIRS = PagePairs.of([(pages(2, 3), pages(7, 5))])


def backup(layer: int = 0, source: Source = "target", pairs: PagePairs = PAIRS) -> LayerCopy:
    return LayerCopy(direction="backup", source=source, layer=layer, pairs=pairs)


def landed(rig: Tiers, layer: int = 0) -> bool:
    held = rig.before[0]["target.kv"][layer, PAIRS.l1]
    return bool(np.array_equal(rig.l2_bytes("target.kv")[layer, PAIRS.l2], held))


def test_copies_end_in_the_order_in_which_they_were_submitted(track: Track) -> None:
    """A later copy starts after an earlier one has ended; each notice comes once, from the queue's thread."""
    order: list[tuple[int, bool]] = []
    with tiers() as rig, track(CopyQueue(rig.copier)) as queue:
        gate = Gate()

        def note(ticket: CopyTicket) -> None:
            order.append((ticket.copy.layer, threading.current_thread() is threading.main_thread()))

        tickets = [queue.submit(backup(n), after=[gate] if n == 0 else [], on_end=note) for n in range(4)]
        assert gate.awaited.wait(WAIT_S)
        assert queue.pending == queue.moving == 4
        assert not any(ticket.done for ticket in tickets)
        gate.happen()
        queue.drain(WAIT_S)
        assert order == [(n, False) for n in range(4)]
        assert all(ticket.done and ticket.quiet for ticket in tickets)
        assert all(landed(rig, layer) for layer in range(4))
        assert queue.pending == queue.moving == 0


@pytest.mark.case("G12")
def test_a_load_waits_for_the_old_reader_of_its_pages(track: Track) -> None:
    """No byte of a load is in its page before the event of the page's last reader has happened."""
    with tiers() as rig, track(CopyQueue(rig.copier)) as queue:
        queue.submit(backup()).wait(WAIT_S)
        rig.forget()
        reader = Gate()
        load = LayerCopy(direction="load", source="target", layer=0, pairs=PAIRS)
        ticket = queue.submit(load, after=[reader])
        assert reader.awaited.wait(WAIT_S)
        assert (rig.l1_bytes("target.kv") == 0xEE).all()
        assert not ticket.done
        reader.happen()
        ticket.wait(WAIT_S)
        assert np.array_equal(rig.l1_bytes("target.kv")[0, PAIRS.l1], rig.before[0]["target.kv"][0, PAIRS.l1])


@pytest.mark.contract(74)
def test_submitting_returns_before_the_bytes_move(track: Track) -> None:
    """Only the data movement is asynchronous: submit returns at once, and wait has a deadline that names the copy."""
    with tiers() as rig, track(CopyQueue(rig.copier)) as queue:
        gate = Gate()
        ticket = queue.submit(backup(1), after=[gate])
        with pytest.raises(
            DeadlineExceeded, match=r"backup of target layer 1, 2 pages is not over"
        ) as caught:
            ticket.wait(0.02)
        assert caught.value.layer == 1
        with pytest.raises(DeadlineExceeded, match="1 copies have not ended"):
            queue.drain(0.02)
        gate.happen()
        ticket.wait(WAIT_S)


def test_a_copy_that_fails_leaves_the_others_alone(track: Track) -> None:
    """An injected error is that copy's outcome and nobody else's, and its bytes do not move."""
    error = TransferFailed("the link is down", layer=1)

    def plan(copy: LayerCopy) -> CopyFault | None:
        return CopyFault(error=error) if copy.layer == 1 else None

    with tiers() as rig, track(CopyQueue(rig.copier, faults=plan)) as queue:
        tickets = [queue.submit(backup(layer)) for layer in range(3)]
        queue.drain(WAIT_S)
        with pytest.raises(TransferFailed) as caught:
            tickets[1].wait(WAIT_S)
        assert caught.value is error
        assert [ticket.error for ticket in tickets] == [None, error, None]
        assert tickets[1].quiet
        assert [landed(rig, layer) for layer in range(3)] == [True, False, True]


class BrokenBackend(RecordingBackend):
    """Raises what no copy is known to raise."""

    def move(self, buffer: LayerBuffer, part: RankPart, direction: Direction) -> int:
        if buffer.name == "target.index":
            raise MemoryError("no staging buffer")
        return super().move(buffer, part, direction)


def test_a_foreign_exception_becomes_a_typed_error(track: Track) -> None:
    """What a backend raises ends its copy with the layer and the cause; the worker lives on."""
    with tiers("layer_first", BrokenBackend()) as rig, track(CopyQueue(rig.copier)) as queue:
        broken, good = queue.submit(backup(1)), queue.submit(backup(2))
        with pytest.raises(
            TransferFailed, match="backup of target layer 1, 2 pages failed: no staging"
        ) as caught:
            broken.wait(WAIT_S)
        assert caught.value.layer == 1
        assert isinstance(caught.value.__cause__, MemoryError)
        good.wait(WAIT_S)
        assert landed(rig, 2)


def test_an_event_that_fails_fails_its_copy(track: Track) -> None:
    """When what a copy waits for raises, nothing is copied."""

    class Failing(Gate):
        def synchronize(self) -> None:
            raise RuntimeError("the device is lost")

    with tiers() as rig, track(CopyQueue(rig.copier)) as queue:
        ticket = queue.submit(backup(), after=[Failing()])
        with pytest.raises(TransferFailed, match="the device is lost"):
            ticket.wait(WAIT_S)
        assert not landed(rig)


def test_a_ticket_that_is_being_told_of_is_no_contradiction() -> None:
    """A copy is quiet a moment before its queue has counted it: a check in between waits for that."""
    telling = threading.Event()
    with tiers() as rig, CopyQueue(rig.copier) as queue:
        queue.submit(backup(), on_quiet=lambda _: (telling.set(), time.sleep(0.2)))  # type: ignore[func-returns-value]
        assert telling.wait(WAIT_S)
        queue.check_integrity()
        assert queue.moving == 0


def test_a_late_landing_is_not_quiet_before_it_has_landed(track: Track) -> None:
    """A copy that fails and lands afterwards is done at once and quiet only then: its pages were not free before."""
    ended, quiet = threading.Event(), threading.Event()
    seen: list[bool] = []
    with tiers() as rig:
        fault = CopyFault(error=TransferFailed("timed out"), lands_after_s=0.15)
        with track(CopyQueue(rig.copier, faults=lambda _: fault)) as queue:
            ticket = queue.submit(
                backup(),
                on_end=lambda t: (seen.append(t.quiet), ended.set()),  # type: ignore[func-returns-value]
                on_quiet=lambda _: quiet.set(),
            )
            assert ended.wait(WAIT_S)
            assert seen == [False]
            assert (queue.pending, queue.moving) == (0, 1)
            ticket.wait_quiet(WAIT_S)
            assert quiet.wait(WAIT_S)
            assert landed(rig)
            with pytest.raises(TransferFailed, match="timed out"):
                ticket.wait(WAIT_S)


@pytest.mark.parametrize("lands_after_s", [None, 0.05])
def test_a_lost_copy_is_never_acknowledged(lands_after_s: float | None, track: Track) -> None:
    """Its bytes land and nobody is told: waits run into their deadline until the queue is closed."""
    with tiers() as rig:
        fault = CopyFault(lost=True, lands_after_s=lands_after_s)
        queue = track(CopyQueue(rig.copier, faults=lambda _: fault))
        ticket = queue.submit(backup())
        until = time.monotonic() + WAIT_S
        while not landed(rig) and time.monotonic() < until:
            time.sleep(0.005)
        assert landed(rig)
        with pytest.raises(DeadlineExceeded, match="not over"):
            ticket.wait(0.02)
        with pytest.raises(DeadlineExceeded, match="may still move"):
            ticket.wait_quiet(0.02)
        assert (queue.pending, queue.moving) == (1, 1)
        queue.close()
        with pytest.raises(NotReady, match="was closed"):
            ticket.wait(WAIT_S)
        assert ticket.quiet
        assert queue.moving == 0


def test_a_delay_holds_up_what_comes_after_it(track: Track) -> None:
    """A slow engine is slow for every copy behind the delayed one, in order."""
    ends: list[float] = []
    with (
        tiers() as rig,
        track(CopyQueue(rig.copier, faults=lambda _: CopyFault(delay_s=0.05))) as queue,
    ):
        start = time.monotonic()
        for layer in range(3):
            queue.submit(backup(layer), on_end=lambda _: ends.append(time.monotonic() - start))
        queue.drain(WAIT_S)
        assert ends == sorted(ends)
        assert all(end >= 0.05 * (n + 1) for n, end in enumerate(ends))


def test_faults_that_contradict_themselves_are_refused() -> None:
    """A lost copy has no error, and only one that fails or is lost lands after its end."""
    with pytest.raises(BadInput, match="reports no error"):
        CopyFault(lost=True, error=TransferFailed("no"))
    with pytest.raises(BadInput, match="only a copy that fails or is lost"):
        CopyFault(lands_after_s=1.0)


def test_closing_ends_every_copy_and_stops_what_was_to_land(track: Track) -> None:
    """After close nothing moves: the copy at work has ended, those behind it fail, a late landing is called off."""
    with tiers() as rig:
        plan = {1: CopyFault(error=TransferFailed("timed out"), lands_after_s=60.0)}
        queue = track(CopyQueue(rig.copier, faults=lambda copy: plan.get(copy.layer)))
        late = queue.submit(backup(1))
        with pytest.raises(TransferFailed):
            late.wait(WAIT_S)
        gate = Gate()
        working, waiting = queue.submit(backup(0), after=[gate]), queue.submit(backup(2))
        assert gate.awaited.wait(WAIT_S)
        closing = threading.Thread(target=queue.close)
        closing.start()
        gate.happen()
        closing.join(WAIT_S)
        working.wait(WAIT_S)
        with pytest.raises(NotReady, match="was closed"):
            waiting.wait(WAIT_S)
        assert all(ticket.quiet for ticket in (late, working, waiting))
        assert not any(isinstance(thread, threading.Timer) for thread in threading.enumerate())
        assert [landed(rig, layer) for layer in range(3)] == [True, False, False]
        with pytest.raises(NotReady, match="is closed"):
            queue.submit(backup())
        queue.close()


def test_a_stuck_copy_keeps_close_from_claiming_the_end(track: Track) -> None:
    """When an event never happens close says so, instead of letting pools go under a copy."""
    with tiers() as rig:
        queue = track(CopyQueue(rig.copier, name="loads"))
        gate = Gate()
        queue.submit(backup(), after=[gate])
        assert gate.awaited.wait(WAIT_S)
        with pytest.raises(DeadlineExceeded, match="kvferry-loads has not stopped"):
            queue.close(timeout_s=0.02)
        gate.happen()
        queue.close()


def test_a_notice_that_raises_harms_nobody(track: Track) -> None:
    """The fault of one caller's notice is logged; its copy and those of others end."""

    def bad(_: CopyTicket) -> None:
        raise ValueError("the loop is closed")

    with tiers() as rig, capture_logs() as logs, track(CopyQueue(rig.copier)) as queue:
        first, second = queue.submit(backup(0), on_end=bad), queue.submit(backup(1))
        first.wait(WAIT_S)
        second.wait(WAIT_S)
        queue.drain(WAIT_S)
    assert [line["event"] for line in logs] == ["a notice of a copy failed"]


def test_a_ticket_ends_once() -> None:
    """A second end, and quiet before the end, are our own faults and not ignored."""
    ticket = CopyTicket(backup())
    with pytest.raises(IllegalTransition, match="cannot fall quiet"):
        ticket.fall_quiet()
    ticket.end()
    with pytest.raises(IllegalTransition, match="ended twice"):
        ticket.end()
    ticket.fall_quiet()
    with pytest.raises(IllegalTransition, match="cannot fall quiet"):
        ticket.fall_quiet()


@pytest.mark.contract(67)
@pytest.mark.contract(39)
def test_all_layers_at_once_is_a_loop_that_warns_each_time(track: Track) -> None:
    """The fallback copies layer by layer with one mapping, brings every byte over, and logs a warning every time."""
    backend = RecordingBackend()
    with tiers("layer_page_first", backend) as rig, track(CopyQueue(rig.copier)) as queue:
        with capture_logs() as logs:
            tickets = submit_all_layers(queue, "backup", PAIRS)
            queue.drain(WAIT_S)
        assert [(t.copy.layer, t.copy.source) for t in tickets] == [
            (0, "target"),
            (1, "target"),
            (2, "target"),
            (3, "target"),
            (3, "draft"),
            (4, "draft"),
        ]
        assert rig.copier.statistics.steps["build"] == 1
        for name, held in rig.before[0].items():
            assert np.array_equal(rig.l2_bytes(name)[:, PAIRS.l2], held[:, PAIRS.l1])
        with capture_logs() as again:
            submit_all_layers(queue, "load", PAIRS, ["target"])
            queue.drain(WAIT_S)
        for lines, direction in ((logs, "backup"), (again, "load")):
            (line,) = lines
            assert line["log_level"] == "warning"
            assert line["event"] == "all layers are copied at once, without the layers' ends"
            assert (line["direction"], line["layers"], line["pages"]) == (direction, 5, 2)


def test_a_copy_of_nothing_is_refused_at_once() -> None:
    """A layer that the source does not store is the submitter's error, not the worker's."""
    with tiers() as rig, CopyQueue(rig.copier) as queue:
        with pytest.raises(BadInput, match="no draft buffer of layer 0"):
            queue.submit(backup(0, "draft"))
        assert queue.submitted == 0
        assert geometry().layers[-1] == 4
