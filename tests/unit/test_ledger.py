"""The ledger: what was recorded is there after a crash, and a restart loses no group and trains none twice."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import InvariantViolated, ServiceFault, UserError
from runtime.ledger import Ledger
from runtime.ledger_reader import DATABASE, LedgerReader
from runtime.ledger_records import CheckpointSaved, Evaluated, Note
from runtime.payloads import PayloadLost, StorageFull, segment_path
from runtime.pipeline.buffer import Buffer
from runtime.pipeline.states import Mark, Phase
from tests.unit.test_buffer import generated, ids, scores, ticket

T = TypeVar("T")
NEEDS = Mark.SCORED | Mark.REFERENCED


def with_ledger(folder: Path, use: Callable[[Ledger], Awaitable[T]], segment_bytes: int = 1 << 20) -> T:
    async def session() -> T:
        ledger = await Ledger.open(folder, segment_bytes)
        try:
            return await use(ledger)
        finally:
            await ledger.close()

    return asyncio.run(asyncio.wait_for(session(), 30))


def buffer_on(ledger: Ledger, step: int = 0, per_step: int = 2, staleness: int = 2) -> Buffer:
    return Buffer(needs=NEEDS, groups_per_step=per_step, staleness=staleness, journal=ledger.record, step=step)


def make_ready(buffer: Buffer, *group_ids: int) -> None:
    for group_id in group_ids:
        if group_id not in buffer:
            buffer.admit(ticket(group_id))
        buffer.dispatch(group_id, "rollout-0")
        buffer.generated(generated(group_id, buffer.committed))
        buffer.scored(scores(group_id))
        buffer.referenced(group_id, b"reference %d" % group_id)


def train(buffer: Buffer, step: int) -> list[int]:
    taken = ids(buffer.take(step, whole=True))
    buffer.consume(step)
    buffer.commit(step + 1)
    return taken


def test_a_finished_run_can_be_read_with_every_filter(tmp_path: Path) -> None:
    async def run(ledger: Ledger) -> None:
        buffer = buffer_on(ledger)
        make_ready(buffer, 0, 1, 2, 3)
        train(buffer, 0)
        train(buffer, 1)
        buffer.admit(ticket(4))
        buffer.drop(4, "end of run")
        result = Evaluated(step=1, problem="p7", label="9", generated=generated(0, 1), scores=scores(0), at=5.0)
        ledger.record(result)
        ledger.record(CheckpointSaved(step=2, incarnation=0, path="checkpoints/2", at=6.0))
        ledger.record(Note(key="stream", value=b"old"))
        ledger.record(Note(key="stream", value=b"position"))

    with_ledger(tmp_path, run)
    with LedgerReader(tmp_path) as reader:
        assert reader.check_final(groups_per_step=2)["retired"] == 4
        (row,) = reader.groups(group_id=2)
        assert (row.problem, row.epoch, row.source, row.label, row.seed) == (52, 0.5, "gsm8k", "4", 14)
        assert (row.phase, row.step, row.place, row.replica, row.attempt) == (Phase.RETIRED, 1, 0, "rollout-0", 1)
        assert (row.prompt_tokens, row.response_tokens, row.reward) == (5, [3, 4], 0.5)
        assert row.scores is not None
        assert row.scores.rewards.tolist() == [1, 0]
        assert reader.read(row.handles["payload"]) == b"payload 2"
        assert reader.read(row.handles["reference"]) == b"reference 2"
        assert list(row.times) == [
            "admitted",
            "generating",
            "generated",
            "ready",
            "consumed",
            "retired",
            "scored",
            "referenced",
        ]
        assert [r.group_id for r in reader.groups(steps=(1, 5))] == [2, 3]
        assert [r.group_id for r in reader.groups(states=[Phase.DROPPED, Phase.READY])] == [4]
        assert [r.group_id for r in reader.groups(reward=(0.4, 0.6), source="gsm8k", limit=3)] == [0, 1, 2]
        assert not list(reader.groups(reward=(0.6, 1.0)))
        assert not list(reader.groups(source="other"))
        assert reader.dropped() == {"end of run": 1}
        assert reader.note("stream") == b"position"
        assert [c.path for c in reader.checkpoints()] == ["checkpoints/2"]
        (evaluation,) = reader.evaluations(problem="p7", steps=(0, 1))
        assert reader.read(evaluation.handle) == b"payload 0"
        assert (evaluation.reward, evaluation.response_tokens) == (0.5, [3, 4])
        assert not list(reader.evaluations(reward=(0.9, 1.0)))


def test_reading_while_the_run_goes_on(tmp_path: Path) -> None:
    async def run(ledger: Ledger) -> None:
        buffer = buffer_on(ledger)
        buffer.admit(ticket(0))
        await ledger.flush()
        with LedgerReader(tmp_path) as reader:
            assert reader.counts()["admitted"] == 1
            make_ready(buffer, 0)
            assert reader.counts()["admitted"] == 1, "not flushed yet"
            await ledger.flush()
            assert reader.counts()["ready"] == 1
            with pytest.raises(InvariantViolated, match="did not end in a final state: 0"):
                reader.check_final()

    with_ledger(tmp_path, run)
    with pytest.raises(UserError, match="no ledger"):
        LedgerReader(tmp_path / "elsewhere")


def test_check_final_names_what_is_wrong(tmp_path: Path) -> None:
    async def run(ledger: Ledger) -> None:
        buffer = buffer_on(ledger, per_step=1)
        make_ready(buffer, 0, 1)
        train(buffer, 0)
        train(buffer, 1)

    with_ledger(tmp_path, run)
    for change, complaint in (
        ("UPDATE groups SET why = 'x' WHERE id = 1", "more than one final state, or none: 1"),
        ("UPDATE groups SET why = NULL, step = 0 WHERE id = 1", "did not train on 1 groups: 0"),
        ("UPDATE groups SET step = 7 WHERE id = 1", "predecessor trained on nothing: 7"),
        ("UPDATE groups SET state = 'ready' WHERE id = 1", "did not end in a final state: 1"),
    ):
        with sqlite3.connect(tmp_path / DATABASE) as database:
            database.execute(change)
        database.close()
        with LedgerReader(tmp_path) as reader, pytest.raises(InvariantViolated, match=complaint):
            reader.check_final(groups_per_step=1)


def test_run_flushes_by_itself_and_hands_errors_to_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(ledger: Ledger) -> None:
        flushed = asyncio.Event()
        flush = ledger.flush

        async def watched() -> None:
            await flush()
            flushed.set()

        monkeypatch.setattr(ledger, "flush", watched)
        task = asyncio.create_task(ledger.run(0.001))
        buffer = buffer_on(ledger)
        make_ready(buffer, 0)
        await flushed.wait()
        with LedgerReader(tmp_path) as reader:
            assert reader.counts()["ready"] == 1
        room = [False]
        write = os.pwrite

        def scarce(fd: int, data: bytes, offset: int) -> int:
            if not room[0]:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(fd, data, offset)

        monkeypatch.setattr("runtime.payloads.os.pwrite", scarce)
        make_ready(buffer, 1)
        with pytest.raises(StorageFull, match="no space left on device"):
            await task
        make_ready(buffer, 2)
        with pytest.raises(StorageFull):
            await ledger.flush()
        room[0] = True
        await ledger.flush()
        with LedgerReader(tmp_path) as reader:
            assert reader.counts()["ready"] == 3, "nothing was lost"
            assert [reader.read(row.handles["payload"]) for row in reader.groups()] == [b"payload %d" % i for i in range(3)]

    with_ledger(tmp_path, run)


def test_a_full_database_rolls_the_whole_tick_back(tmp_path: Path) -> None:
    async def run(ledger: Ledger) -> None:
        buffer = buffer_on(ledger)
        await ledger.flush()
        database = ledger._writer._database
        (pages,) = await ledger._call("test", lambda _: database.execute("PRAGMA page_count").fetchone())
        await ledger._call("test", lambda _: database.execute(f"PRAGMA max_page_count = {pages + 2}").fetchall())
        make_ready(buffer, *range(300))
        with pytest.raises(StorageFull, match="no space left on device"):
            await ledger.flush()
        with LedgerReader(tmp_path) as reader:
            assert sum(reader.counts().values()) == 0
        size = segment_path(tmp_path, 0).stat().st_size
        await ledger._call("test", lambda _: database.execute("PRAGMA max_page_count = 100000").fetchall())
        await ledger.flush()
        assert segment_path(tmp_path, 0).stat().st_size == size, "payloads are not written twice"

    with_ledger(tmp_path, run)
    with LedgerReader(tmp_path) as reader:
        assert reader.counts()["ready"] == 300


def test_a_change_of_an_unknown_group_and_a_second_coordinator_are_refused(tmp_path: Path) -> None:
    async def run(ledger: Ledger) -> None:
        with pytest.raises(UserError, match="in use by another coordinator"):
            await Ledger.open(tmp_path, 100)
        other = Buffer(needs=NEEDS, groups_per_step=1, staleness=0, journal=lambda change: None)
        make_ready(other, 5)
        other._journal = ledger.record
        other.take(0)
        with pytest.raises(InvariantViolated, match="never admitted"):
            await ledger.flush()
        ledger._pending.clear()
        ledger._recorded = ledger._written
        ledger.record(Note(key="after", value=b"1"))
        assert await ledger.note("after") == b"1", "the refused transaction was rolled back"

    with_ledger(tmp_path, run)


def test_a_locked_database_is_a_fault_with_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.ledger.BUSY_TIMEOUT", 0.01)

    async def run(ledger: Ledger) -> None:
        other = sqlite3.connect(tmp_path / DATABASE, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        buffer_on(ledger).admit(ticket(0))
        with pytest.raises(ServiceFault, match=r"ledger: write: .*locked"):
            await ledger.flush()
        other.execute("ROLLBACK")
        other.close()
        await ledger.flush()

    with_ledger(tmp_path, run)
    with LedgerReader(tmp_path) as reader:
        assert reader.counts()["admitted"] == 1


CRASH = """
import asyncio, os, signal, sys
from pathlib import Path
from runtime.ledger import Ledger
from tests.unit.test_ledger import buffer_on, make_ready, train, ticket

async def main():
    ledger = await Ledger.open(Path(sys.argv[1]), 300)
    buffer = buffer_on(ledger)
    make_ready(buffer, 0, 1, 2, 3, 4, 5)
    train(buffer, 0)
    train(buffer, 1)
    assert [g.group_id for g in buffer.take(2)] == [4, 5]
    await ledger.trained(3)
    buffer.consume(2)
    make_ready(buffer, 6, 7, 8)
    buffer.admit(ticket(9)); buffer.dispatch(9, "rollout-0")
    buffer.admit(ticket(10))
    buffer.take(3)
    await ledger.flush()
    buffer.commit(3)
    print("crash", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def crash(folder: Path) -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", CRASH, str(folder)], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr


def test_after_kill_9_nothing_is_lost_and_nothing_trained_twice(tmp_path: Path) -> None:
    crash(tmp_path)
    with LedgerReader(tmp_path) as reader:
        assert reader.counts()["consumed"] == 2, "a crashed ledger can be read before anything has repaired it"

    async def resume(ledger: Ledger) -> dict[int, tuple[str, int]]:
        restored = await ledger.restore(2, [(0, 3)], NEEDS)
        assert restored.incarnation == 1
        assert (await ledger.restore(2, [(0, 3)], NEEDS)).incarnation == 2, "an incarnation is never used twice"
        buffer = buffer_on(ledger, step=2)
        assert buffer.load(restored.groups) == []
        assert ids(buffer.take(2)) == [4, 5], "the dead branch's batch is trained again, from what it was trained on"
        assert await ledger.read(buffer[4].payload) == b"payload 4"
        assert await ledger.read(buffer[4].reference) == b"reference 4"
        buffer.consume(2)
        buffer.commit(3)
        return {row.group_id: (row.phase.value, row.seed) for row in restored.groups}

    assert with_ledger(tmp_path, resume) == {
        **{i: ("ready", 7 * i) for i in (4, 5, 6, 7, 8)},
        **{i: ("admitted", 7 * i) for i in (9, 10)},
    }
    with LedgerReader(tmp_path) as reader:
        assert [(row.group_id, row.step) for row in reader.groups(states=[Phase.RETIRED])] == [
            (0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (5, 2),
        ]  # fmt: skip


def test_the_checkpoint_is_the_truth_over_a_journal_that_lags(tmp_path: Path) -> None:
    async def run(ledger: Ledger) -> None:
        buffer = buffer_on(ledger)
        make_ready(buffer, *range(6))
        train(buffer, 0)
        make_ready(buffer, 6)
        buffer.take(1)
        buffer.take(2)
        assert await ledger.trained(3) == [(0, 5)], "sent to the trainer before the checkpoint, so part of it"
        assert await ledger.trained(1) == [(0, 1)]
        restored = await ledger.restore(3, [(0, 5)], NEEDS)
        assert [row.group_id for row in restored.groups] == [6]

        assert await ledger.trained(9) == [(0, 5)]

    with_ledger(tmp_path, run)
    with LedgerReader(tmp_path) as reader:
        trained = [(row.group_id, row.step) for row in reader.groups(states=[Phase.RETIRED])]
        assert trained == [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (5, 2)]


def test_what_a_checkpoint_names_does_not_depend_on_the_ticks_that_were_lost(tmp_path: Path) -> None:
    async def run(ledger: Ledger) -> None:
        buffer = buffer_on(ledger)
        make_ready(buffer, 0, 1, 2, 3)
        await ledger.restore(1, [(0, 1)], NEEDS)
        assert await ledger.trained(1) == [(0, 1)], "their taking was never recorded"
        again = buffer_on(ledger, step=1)
        again.load((await ledger.restore(1, [(0, 1)], NEEDS)).groups)
        again.take(1)
        await ledger.restore(1, [(0, 1)], NEEDS)
        assert await ledger.trained(9) == [(0, 1)], "the batch of the dead branch is nobody's"

    with_ledger(tmp_path, run)


def test_a_lost_payload_is_generated_again_with_its_seed(tmp_path: Path) -> None:
    async def run(ledger: Ledger) -> None:
        buffer = buffer_on(ledger)
        make_ready(buffer, 0, 1)
        await ledger.flush()
        make_ready(buffer, 2)
        buffer.admit(ticket(3))
        buffer.dispatch(3, "rollout-0")
        buffer.generated(generated(3, 0))
        await ledger.flush()
        train(buffer, 0)
        handle = next(LedgerReader(tmp_path).groups(group_id=1)).handles["reference"]
        with segment_path(tmp_path, handle.segment).open("r+b") as file:
            file.seek(handle.offset + 20)
            file.write(b"?")
        with pytest.raises(PayloadLost):
            await ledger.read(handle)
        rows = {row.group_id: row for row in (await ledger.restore(0, [], NEEDS)).groups}
        assert {i: row.phase.value for i, row in rows.items()} == {0: "ready", 1: "admitted", 2: "ready", 3: "generated"}
        assert (rows[1].seed, rows[1].attempt, rows[1].handles, rows[1].oldest) == (7, 1, {}, None)
        assert rows[0].step is rows[0].taken is rows[0].place is None
        assert "consumed" not in rows[0].times
        again = buffer_on(ledger)
        assert again.load(list(rows.values())) == []
        make_ready(again, 1)
        again.scored(scores(3))
        again.referenced(3, b"")
        assert train(again, 0) == [0, 1]
        assert train(again, 1) == [2, 3]

    with_ledger(tmp_path, run)
    with LedgerReader(tmp_path) as reader:
        assert reader.check_final(groups_per_step=2)["retired"] == 4


def test_a_resume_with_fewer_groups_a_step_generates_the_overdue_again(tmp_path: Path) -> None:
    async def run(ledger: Ledger) -> list[int]:
        make_ready(buffer_on(ledger, per_step=4, staleness=1), *range(8))
        restored = await ledger.restore(0, [], NEEDS)
        smaller = buffer_on(ledger, per_step=2, staleness=1)
        late = smaller.load(restored.groups)
        assert smaller.capacity(100, 100) == 0
        assert train(smaller, 0) == [0, 1]
        assert smaller.capacity(100, 100) == 2
        return late

    assert with_ledger(tmp_path, run) == [4, 5, 6, 7]


def test_trim_keeps_what_a_restart_needs(tmp_path: Path) -> None:
    async def run(ledger: Ledger) -> None:
        buffer = buffer_on(ledger, per_step=1)
        for step in range(4):
            make_ready(buffer, step)  # more than a segment each
            train(buffer, step)
        make_ready(buffer, 4)
        assert await ledger.trim(2, 1 << 20) == []
        deleted = await ledger.trim(2, 0)
        assert deleted
        kept = {}
        with LedgerReader(tmp_path) as reader:
            for row in reader.groups():
                try:
                    kept[row.group_id] = [reader.read(handle) for handle in row.handles.values()]
                except PayloadLost:
                    continue
        assert set(kept) == {2, 3, 4}

    with_ledger(tmp_path, run, segment_bytes=30)


async def go_on(ledger: Ledger, start: int, trained: list[tuple[int, int]], until: int, fresh: int) -> Buffer:
    """Resume from the checkpoint of `start` and train to `until`, generating again whatever the restart says."""
    restored = await ledger.restore(start, trained, NEEDS)
    buffer = buffer_on(ledger, step=start)
    assert buffer.load(restored.groups) == []
    new = itertools.count(max([fresh, *(row.group_id + 1 for row in restored.groups)]))
    for step in range(start, until):
        while sum(group.state.phase == Phase.READY and group.taken is None for group in buffer) < 2:
            again = [group for group in buffer if group.state.phase in (Phase.ADMITTED, Phase.GENERATED)]
            if again and again[0].state.phase == Phase.GENERATED:
                buffer.lose(again[0].group_id)
            make_ready(buffer, again[0].group_id if again else next(new))
        train(buffer, step)
    return buffer


@given(budget=st.integers(0, 56), checkpoint=st.integers(0, 4), later=st.integers(0, 2), ahead=st.booleans())
@settings(max_examples=30, deadline=None)
def test_a_run_cut_anywhere_twice_ends_with_every_group_trained_once(
    tmp_path_factory: pytest.TempPathFactory, budget: int, checkpoint: int, later: int, ahead: bool
) -> None:
    """The journal stops after any record; the run goes back to any step that it has passed, is cut again, and then ends."""
    folder = tmp_path_factory.mktemp("ledger")

    async def first(ledger: Ledger) -> tuple[int, list[tuple[int, int]]]:
        left = itertools.count(budget, -1)
        buffer = buffer_on(ledger)
        buffer._journal = lambda change: ledger.record(change) if next(left) > 0 else None
        passed = 0
        for step in range(4):
            make_ready(buffer, 2 * step, 2 * step + 1)
            train(buffer, step)
            passed = step + 1 if next(left) > 0 else passed
        start = min(checkpoint, passed)
        return start, await ledger.trained(start)

    async def second(ledger: Ledger) -> list[tuple[int, int]]:
        buffer = await go_on(ledger, start, trained, start + later, 8)
        if ahead:
            make_ready(buffer, 100, 101, 102)
            buffer.take(start + later)
        return await ledger.trained(start + later)

    async def third(ledger: Ledger) -> None:
        buffer = await go_on(ledger, start + later, trained, 7, 200)
        for group in list(buffer):
            buffer.drop(group.group_id, "end of run")

    start, trained = with_ledger(folder, first)
    trained = with_ledger(folder, second)
    with_ledger(folder, third)
    with LedgerReader(folder) as reader:
        assert reader.check_final(groups_per_step=2)["retired"] == 14
