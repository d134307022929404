"""The ledger: full storage loses nothing, a restart trains no group twice, a power cut leaves a transaction whole or not."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import random
import re
import shutil
import sqlite3
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct, structs

from runtime import timeouts
from runtime.coordinator.buffer import Buffer, restored
from runtime.coordinator.failover import reopened
from runtime.errors import InvariantViolated, UserError
from runtime.ledger import journal
from runtime.ledger.journal import CheckpointSaved, LedgerWriter, Note, PayloadStore
from runtime.ledger.reader import DATABASE, GroupRow, Handle, LedgerReader, PayloadLost, read_payload, segment_path, segments
from runtime.ledger.states import Mark, Phase
from runtime.types import Outcomes
from tests.unit.test_buffer import KeptChanges, generated, ids, scores, ticket

T = TypeVar("T")
NEEDS = Mark.SCORED | Mark.REFERENCED


def with_ledger(folder: Path, use: Callable[[LedgerWriter], Awaitable[T]], segment_bytes: int = 1 << 20) -> T:
    async def session() -> T:
        ledger = await LedgerWriter.open(folder, segment_bytes)
        try:
            return await use(ledger)
        finally:
            await ledger.close()

    return asyncio.run(asyncio.wait_for(session(), 30))


def counts(folder: Path) -> dict[str, int]:
    with LedgerReader(folder) as reader:
        return reader.counts()


def buffer_on(ledger: LedgerWriter, step: int = 0, per_step: int = 2, staleness: int = 2) -> Buffer:
    return Buffer(needs=NEEDS, groups_per_step=per_step, staleness=staleness, journal=ledger, clock=time.time, step=step)


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


# --------------------------------------------------------------------------------------------------------------------- payloads
@pytest.fixture
def store(tmp_path: Path) -> Iterator[PayloadStore]:
    store = PayloadStore(tmp_path, segment_bytes=256)
    yield store
    store.close()


def test_records_come_back_across_segments_and_restarts(tmp_path: Path, store: PayloadStore) -> None:
    written = {store.append(data): data for data in (b"", b"a" * 100, b"b" * 200, b"c" * 1000, b"d")}
    assert {handle.segment for handle in written} == {0, 1, 2, 3}, "a record is never split, and one too long has its own"
    again = PayloadStore(tmp_path, segment_bytes=256)
    assert again.append(b"later").segment == 4, "nothing is written behind a tail that may be torn"
    for handle, data in written.items():
        assert read_payload(again.folder, handle) == data
    again.close()


@given(data=st.binary(min_size=1, max_size=64), where=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_any_flipped_bit_is_noticed(tmp_path_factory: pytest.TempPathFactory, data: bytes, where: int, bit: int) -> None:
    folder = tmp_path_factory.mktemp("segments")
    store = PayloadStore(folder, 1 << 20)
    before, handle = store.append(b"before"), store.append(data)
    store.close()
    path = segment_path(folder, handle.segment)
    content = bytearray(path.read_bytes())
    content[handle.offset + where % (16 + len(data))] ^= 1 << bit
    path.write_bytes(content)
    with pytest.raises(PayloadLost, match=r"segment-00000\.bin"):
        read_payload(folder, handle)
    assert read_payload(folder, before) == b"before"


def test_a_torn_or_missing_record_is_lost(tmp_path: Path, store: PayloadStore) -> None:
    handle = store.append(b"x" * 50)
    os.truncate(segment_path(tmp_path, 0), 40)
    for lost, why in ((handle, "torn"), (Handle(0, 4096, 8), "torn"), (Handle(9, 0, 8), "gone")):
        with pytest.raises(PayloadLost, match=why):
            read_payload(store.folder, lost)


def test_retention_deletes_the_oldest_retired_segments_only_and_no_number_is_used_twice(store: PayloadStore) -> None:
    handles = [store.append(bytes([i]) * 200) for i in range(5)]  # one to a segment, 216 bytes each
    assert store.retain({0}, retain_bytes=2 * 216) == [1], "4 is current and does not count"
    assert store.retain({0}, retain_bytes=2 * 216) == []
    assert store.retain({0}, retain_bytes=0) == [2, 3]
    assert read_payload(store.folder, handles[0]) == b"\0" * 200
    with pytest.raises(PayloadLost):
        read_payload(store.folder, handles[1])
    store.retain((), 0)
    again = PayloadStore(store.folder, 10)
    assert again.segment == 5
    again.close()


# -------------------------------------------------------------------------------------------------------------- reading
def test_a_finished_run_can_be_read_with_every_filter(tmp_path: Path) -> None:
    async def run(ledger: LedgerWriter) -> None:
        buffer = buffer_on(ledger)
        make_ready(buffer, 0, 1, 2, 3)
        train(buffer, 0)
        train(buffer, 1)
        buffer.admit(ticket(4))
        buffer.drop(4, "end of run")
        ledger.record(CheckpointSaved(step=2, incarnation=0, path="checkpoints/2", at=6.0))
        ledger.record(Note(key="stream", value=b"old"))
        ledger.record(Note(key="stream", value=b"position"))

    with_ledger(tmp_path, run)
    with LedgerReader(tmp_path) as reader:
        assert reader.check_final(groups_per_step=2)["retired"] == 4
        (row,) = reader.groups(group_id=2)
        assert (row.problem, row.source, row.label, row.seed) == (52, "gsm8k", "4", 14)
        assert (row.phase, row.step, row.place, row.replica, row.attempt) == (Phase.RETIRED, 1, 0, "rollout-0", 1)
        assert (row.prompt_tokens, row.response_tokens, row.reward) == (5, [3, 4], 0.5)
        assert row.scores is not None
        assert row.scores.rewards.tolist() == [1, 0]
        assert reader.read(row.handles["payload"]) == b"payload 2"
        assert reader.read(row.handles["reference"]) == b"reference 2"
        stamps = ["admitted", "generating", "generated", "ready", "consumed", "retired", "scored", "referenced"]
        assert list(row.times) == stamps
        assert [r.group_id for r in reader.groups(steps=(1, 5))] == [2, 3]
        assert [r.group_id for r in reader.groups(states=[Phase.DROPPED, Phase.READY])] == [4]
        assert [r.group_id for r in reader.groups(reward=(0.4, 0.6))][:3] == [0, 1, 2]
        assert not list(reader.groups(reward=(0.6, 1.0)))
        assert reader.dropped() == {"end of run": 1}
        assert reader.note("stream") == b"position"
        assert [c.path for c in reader.checkpoints()] == ["checkpoints/2"]


def test_what_became_of_episodes_and_what_who_played_gave_is_read_as_it_was_written(tmp_path: Path) -> None:
    """It is not scored again by asking: the columns are all that is left of it."""
    outcomes = Outcomes(
        environment="maze",
        reasons=["completed", "left out: slow"],
        turns=[3, 0],
        log={"moves": (1, 2.5)},
        repeated={"environment-0: it was lost": 2},
    )
    rewards = [0.5, float("nan")]

    async def run(ledger: LedgerWriter) -> None:
        buffer = buffer_on(ledger)
        for group_id, told, gave in ((0, outcomes, rewards), (1, None, [])):
            buffer.admit(ticket(group_id))
            buffer.dispatch(group_id, "gateway-0")
            made = structs.replace(generated(group_id, 0), response_tokens=[3, 4, 5], outcomes=told, rewards=gave)
            buffer.generated(made)

    with_ledger(tmp_path, run)
    with LedgerReader(tmp_path) as reader:
        played, replies = reader.groups()
    assert (played.outcomes, replies.outcomes) == (outcomes, None)
    first, second = (restored(row, NEEDS, 0.0, 2).generated for row in (played, replies))
    assert first is not None and second is not None
    assert first.outcomes == outcomes
    np.testing.assert_array_equal(first.rewards, rewards)
    assert (first.n, first.response_tokens, second.n, second.rewards) == (2, [3, 4, 5], 3, [])


def test_check_final_names_what_is_wrong(tmp_path: Path) -> None:
    async def run(ledger: LedgerWriter) -> None:
        buffer = buffer_on(ledger, per_step=1)
        make_ready(buffer, 0, 1)
        train(buffer, 0)
        train(buffer, 1)

    with pytest.raises(UserError, match="no ledger"):
        LedgerReader(tmp_path)
    with_ledger(tmp_path, run)
    for change, complaint in (
        ("UPDATE groups SET why = 'x' WHERE id = 1", "more than one final state, or none: 1"),
        ("UPDATE groups SET why = NULL, step = 0 WHERE id = 1", "did not train on 1 groups: 0"),
        ("UPDATE groups SET step = 7 WHERE id = 1", "predecessor trained on nothing: 7"),
        ("UPDATE groups SET state = 'ready' WHERE id = 1", "did not end in a final state: 1"),
    ):
        with closing(sqlite3.connect(tmp_path / DATABASE, isolation_level=None)) as database:
            database.execute(change)
        with LedgerReader(tmp_path) as reader, pytest.raises(InvariantViolated, match=complaint):
            reader.check_final(groups_per_step=1)


# -------------------------------------------------------------------------------------------------------------- writing
async def until_waits(ledger: LedgerWriter, why: str) -> None:
    """Until `ledger` says that it waits for room, with the path and the bytes that it needs."""
    while not ledger.waits:  # noqa: ASYNC110 - the ledger tells nobody
        await asyncio.sleep(0)
    assert re.match(rf"waits until [\d,]+ bytes can be written to {ledger.folder}: .*{why}", ledger.waits)


class Scarce:
    """A disk that takes so many bytes: `room`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int):
        self.room, self._write = room, os.pwrite
        monkeypatch.setattr("runtime.ledger.journal.os.pwrite", self)

    def __call__(self, fd: int, data: bytes, offset: int) -> int:
        allowed = min(len(data), self.room)
        if not allowed:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= allowed
        return self._write(fd, data[:allowed], offset)


def test_run_flushes_by_itself_and_waits_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "DISK_RETRY", 0.01)

    async def run(ledger: LedgerWriter) -> None:
        flushed = asyncio.Event()
        flush = ledger.flush

        async def watched() -> None:
            await flush()
            flushed.set()

        monkeypatch.setattr(ledger, "flush", watched)
        task = asyncio.create_task(ledger.run())
        buffer = buffer_on(ledger)
        make_ready(buffer, 0)
        await flushed.wait()
        assert counts(tmp_path)["ready"] == 1
        before, disk = segments(tmp_path), Scarce(monkeypatch, 10)
        make_ready(buffer, 1)
        await until_waits(ledger, "no space left on device")
        assert segments(tmp_path) == before, "nothing half written stays behind"
        make_ready(buffer, 2)
        assert counts(tmp_path)["ready"] == 1
        disk.room = 1 << 20
        await flush()
        assert not ledger.waits
        task.cancel()
        with LedgerReader(tmp_path) as reader:
            assert reader.counts()["ready"] == 3, "nothing was lost"
            assert [reader.read(row.handles["payload"]) for row in reader.groups()] == [b"payload %d" % i for i in range(3)]

    with_ledger(tmp_path, run)


@pytest.mark.parametrize("locked", [False, True])
def test_a_database_that_is_full_or_locked_rolls_the_whole_tick_back_and_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locked: bool
) -> None:
    monkeypatch.setattr(timeouts, "DISK_RETRY", 0.01)
    monkeypatch.setattr("runtime.timeouts.LEDGER_LOCK", 0.01)

    async def run(ledger: LedgerWriter) -> None:
        async def on_its_thread(sql: str) -> None:
            await ledger._call("test", lambda _: database.execute(sql).fetchall())

        buffer = buffer_on(ledger)
        await ledger.flush()
        database = ledger._writer._database
        other = sqlite3.connect(tmp_path / DATABASE, isolation_level=None)
        (pages,) = other.execute("PRAGMA page_count").fetchone()
        if locked:
            other.execute("BEGIN IMMEDIATE")
        else:
            await on_its_thread(f"PRAGMA max_page_count = {pages + 2}")
        make_ready(buffer, *range(300))
        flushing = asyncio.create_task(ledger.flush())
        await until_waits(ledger, "locked" if locked else "no space left on device")
        assert sum(counts(tmp_path).values()) == 0
        size = segment_path(tmp_path, 0).stat().st_size
        other.close()
        await on_its_thread("PRAGMA max_page_count = 100000")
        await flushing
        assert segment_path(tmp_path, 0).stat().st_size == size, "payloads are not written twice"

    with_ledger(tmp_path, run)
    assert counts(tmp_path)["ready"] == 300


def test_a_ledger_of_another_format_is_neither_read_nor_written(tmp_path: Path) -> None:
    async def run(ledger: LedgerWriter) -> None:
        make_ready(buffer_on(ledger), 0)

    with_ledger(tmp_path, run)
    with closing(sqlite3.connect(tmp_path / DATABASE)) as database:
        database.execute("PRAGMA user_version = 0")
        before = database.execute("SELECT * FROM groups").fetchall()
        for use in (lambda: LedgerReader(tmp_path), lambda: with_ledger(tmp_path, run)):
            with pytest.raises(UserError, match=f"^{tmp_path}: the ledger is of format 0, and .* reads format 5 only$"):
                use()
        assert database.execute("SELECT * FROM groups").fetchall() == before


def test_a_change_of_an_unknown_group_and_a_second_coordinator_are_refused(tmp_path: Path) -> None:
    async def run(ledger: LedgerWriter) -> None:
        with pytest.raises(UserError, match=f"in use by another coordinator: process {os.getpid()}, "):
            await LedgerWriter.open(tmp_path, 100)
        with pytest.raises(UserError, match="in use by another coordinator"):
            await reopened(tmp_path, 0.0)
        assert (tmp_path / "ledger.lock").stat().st_mode & 0o777 == 0o600
        other = Buffer(needs=NEEDS, groups_per_step=1, staleness=0, journal=KeptChanges(), clock=time.time)  # type: ignore[arg-type]
        make_ready(other, 5)
        other._journal = ledger
        other.take(0)
        with pytest.raises(InvariantViolated, match="never admitted"):
            await ledger.flush()
        ledger._pending.clear()
        ledger._recorded = ledger._written
        ledger.record(Note(key="after", value=b"1"))
        assert await ledger.note("after") == b"1", "the refused transaction was rolled back"

    with_ledger(tmp_path, run)


# ---------------------------------------------------------------------------------------------------------------- after a crash
@pytest.fixture
def crashed(tmp_path: Path) -> Path:
    """What a coordinator leaves that was killed at step 2, whose groups were consumed; those of step 3 were taken."""

    async def until_the_crash(ledger: LedgerWriter) -> None:
        buffer = buffer_on(ledger)
        make_ready(buffer, 0, 1, 2, 3, 4, 5)
        train(buffer, 0)
        train(buffer, 1)
        assert ids(buffer.take(2)) == [4, 5]
        await ledger.trained(3)
        buffer.consume(2)
        make_ready(buffer, 6, 7, 8)
        buffer.admit(ticket(9))
        buffer.dispatch(9, "rollout-0")
        buffer.admit(ticket(10))
        buffer.take(3)
        await ledger.flush()
        buffer.commit(3)
        shutil.copytree(ledger.folder, tmp_path / "ledger", ignore=shutil.ignore_patterns("*-shm", "*.lock"))

    with_ledger(tmp_path / "alive", until_the_crash, segment_bytes=300)
    return tmp_path / "ledger"


def test_after_kill_9_nothing_is_lost_and_nothing_trained_twice(crashed: Path) -> None:
    with LedgerReader(crashed) as reader:
        assert reader.counts()["consumed"] == 2, "a crashed ledger can be read before anything has repaired it"

    async def resume(ledger: LedgerWriter) -> dict[int, tuple[str, int]]:
        restored = await ledger.restore(2, [(0, 3)], NEEDS)
        assert restored.incarnation == 1
        assert (await ledger.restore(2, [(0, 3)], NEEDS)).incarnation == 2, "an incarnation is never used twice"
        buffer = buffer_on(ledger, step=2)
        assert buffer.load(restored.groups) == []
        assert ids(buffer.take(2)) == [4, 5], "the dead branch's batch is trained again, from what it was trained on"
        assert await ledger.bytes_of(buffer[4].payload) == b"payload 4"
        assert await ledger.bytes_of(buffer[4].reference) == b"reference 4"
        buffer.consume(2)
        buffer.commit(3)
        return {row.group_id: (row.phase.value, row.seed) for row in restored.groups}

    assert with_ledger(crashed, resume) == {i: ("ready" if i < 9 else "admitted", 7 * i) for i in range(4, 11)}
    assert retired(crashed) == SIX


SIX = [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (5, 2)]


def retired(folder: Path) -> list[tuple[int, int | None]]:
    with LedgerReader(folder) as reader:
        return [(row.group_id, row.step) for row in reader.groups(states=[Phase.RETIRED])]


def test_a_coordinator_that_takes_over_goes_on_after_the_step_that_was_over_last(crashed: Path) -> None:
    """What is being generated still is, as the same attempt."""

    async def go_on(ledger: LedgerWriter) -> None:
        assert await ledger.begin_term() == 1
        assert await ledger.begin_term() == 2, "no two coordinators have the same term"
        for _ in range(2):  # the one that takes over may be lost as well
            buffer = buffer_on(ledger, step=2)
            buffer.take_up(await ledger.take_up(2))
            assert buffer.step == 4, "two batches are whole"
            assert ids(buffer.taken(2)) == [4, 5]
            assert ids(buffer.taken(3)) == [6, 7]
        assert (buffer[9].state.phase, buffer[9].replica, buffer[9].attempt) == (Phase.GENERATING, "rollout-0", 1)
        assert (buffer[10].state.phase, buffer[10].attempt) == (Phase.ADMITTED, 0)
        assert buffer[8].state.phase == Phase.READY
        assert await ledger.bytes_of(buffer[4].payload) == b"payload 4"
        buffer.consume(2)
        buffer.commit(3)
        assert 4 not in buffer and 5 not in buffer

    with_ledger(crashed, go_on)
    assert retired(crashed) == SIX


def test_what_waits_for_the_ledger_is_called_once_it_is_written(tmp_path: Path) -> None:
    async def run(ledger: LedgerWriter) -> None:
        called, buffer = list[int](), buffer_on(ledger)
        ledger.then(lambda: called.append(0))
        assert called == [0], "there is nothing to write"
        for number in (1, 2):
            make_ready(buffer, number)
            ledger.then(lambda number=number: called.append(number))
        assert called == [0]
        await ledger.flush()
        assert called == [0, 1, 2]

    with_ledger(tmp_path, run)


def test_the_checkpoint_is_the_truth_over_a_journal_that_lags(tmp_path: Path) -> None:
    async def run(ledger: LedgerWriter) -> None:
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

    with_ledger(tmp_path / "taken", run)
    assert retired(tmp_path / "taken") == SIX

    async def lost(ledger: LedgerWriter) -> None:
        make_ready(buffer_on(ledger), 0, 1, 2, 3)
        await ledger.restore(1, [(0, 1)], NEEDS)
        assert await ledger.trained(1) == [(0, 1)], "their taking was never recorded"
        again = buffer_on(ledger, step=1)
        again.load((await ledger.restore(1, [(0, 1)], NEEDS)).groups)
        again.take(1)
        await ledger.restore(1, [(0, 1)], NEEDS)
        assert await ledger.trained(9) == [(0, 1)], "the batch of the dead branch is nobody's"

    with_ledger(tmp_path / "lost", lost)


def test_a_lost_payload_is_generated_again_with_its_seed(tmp_path: Path) -> None:
    async def run(ledger: LedgerWriter) -> None:
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
            await ledger.bytes_of(handle)
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


def test_trim_keeps_what_a_restart_needs(tmp_path: Path) -> None:
    async def run(ledger: LedgerWriter) -> None:
        buffer = buffer_on(ledger, per_step=1)
        for step in range(4):
            make_ready(buffer, step)  # more than a segment each
            train(buffer, step)
        make_ready(buffer, 4)
        assert await ledger.trim(2, 1 << 20) == []
        assert await ledger.trim(2, 0)
        kept = {}
        with LedgerReader(tmp_path) as reader:
            for row in reader.groups():
                try:
                    kept[row.group_id] = [reader.read(handle) for handle in row.handles.values()]
                except PayloadLost:
                    continue
        assert set(kept) == {2, 3, 4}

    with_ledger(tmp_path, run, segment_bytes=30)


async def go_on(ledger: LedgerWriter, start: int, trained: list[tuple[int, int]], until: int, fresh: int) -> Buffer:
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
def test_a_run_cut_anywhere_twice_ends_with_every_group_trained_once(
    tmp_path_factory: pytest.TempPathFactory, budget: int, checkpoint: int, later: int, ahead: bool
) -> None:
    """The journal stops after any record; the run goes back to any step that it has passed, is cut again, and then ends."""
    folder = tmp_path_factory.mktemp("ledger")

    async def first(ledger: LedgerWriter) -> tuple[int, list[tuple[int, int]]]:
        left = itertools.count(budget, -1)
        buffer = buffer_on(ledger)
        buffer._journal = SimpleNamespace(record=lambda change: ledger.record(change) if next(left) > 0 else None)
        passed = 0
        for step in range(4):
            make_ready(buffer, 2 * step, 2 * step + 1)
            train(buffer, step)
            passed = step + 1 if next(left) > 0 else passed
        start = min(checkpoint, passed)
        return start, await ledger.trained(start)

    async def second(ledger: LedgerWriter) -> list[tuple[int, int]]:
        buffer = await go_on(ledger, start, trained, start + later, 8)
        if ahead:
            make_ready(buffer, 100, 101, 102)
            buffer.take(start + later)
        return await ledger.trained(start + later)

    async def third(ledger: LedgerWriter) -> None:
        buffer = await go_on(ledger, start + later, trained, 7, 200)
        for group in list(buffer):
            buffer.drop(group.group_id, "end of run")

    start, trained = with_ledger(folder, first)
    trained = with_ledger(folder, second)
    with_ledger(folder, third)
    with LedgerReader(folder) as reader:
        assert reader.check_final(groups_per_step=2)["retired"] == 14


# ------------------------------------------------------------------------------------------------------------ after a power cut
SECTOR = 512  # bytes that a disk writes whole or not at all
SEGMENT = 80  # bytes: two or three records
CUTS = 10  # for each moment
WAL = f"{DATABASE}-wal"


class Moment(Struct):
    """What the files hold once a transaction is over, and how much of each is synced; what the ledger says then."""

    files: dict[str, bytes]
    synced: dict[str, int]
    says: dict[int, tuple[Phase, int]]
    notes: dict[str, bytes]
    checkpoint: int  # the newest that was announced, as its files were synced
    trained: list[tuple[int, int]]


class Recorder:
    """Follows a ledger: every sync as it happens, and a moment after each flush."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.folder, self.moments, self.synced = folder, list[Moment](), dict[str, int]()
        self._checkpoint, self._trained = 0, list[tuple[int, int]]()
        sync, transaction = os.fsync, journal._Writer._transaction

        def seen(descriptor: int) -> None:
            sync(descriptor)
            self._is_synced(Path(f"/proc/self/fd/{descriptor}").readlink())

        def followed(writer: journal._Writer, durable: bool = False):  # type: ignore[no-untyped-def]
            with transaction(writer, durable):
                yield
            if durable:
                self._is_synced(folder / WAL)

        monkeypatch.setattr("runtime.ledger.journal.os.fsync", seen)
        monkeypatch.setattr(journal._Writer, "_transaction", journal.contextmanager(followed))

    async def flushed(self, ledger: LedgerWriter) -> None:
        await ledger.flush()
        files = {path.name: path.read_bytes() for path in self.folder.iterdir() if not path.name.endswith(("-shm", ".lock"))}
        with LedgerReader(self.folder) as reader:
            says = told(reader)
        notes = {key: value for key in ("stream", "term") if (value := await ledger.note(key)) is not None}
        self.moments.append(Moment(files, dict(self.synced), says, notes, self._checkpoint, self._trained))

    async def checkpoint(self, ledger: LedgerWriter, step: int) -> None:
        self._trained, self._checkpoint = await ledger.trained(step), step
        ledger.record(CheckpointSaved(step=step, incarnation=0, path=f"checkpoints/{step}", at=6.0))

    def _is_synced(self, path: Path) -> None:
        self.synced[path.name] = path.stat().st_size


def told(reader: LedgerReader) -> dict[int, tuple[Phase, int]]:
    return {row.group_id: (row.phase, row.seed) for row in reader.groups()}


async def live(ledger: LedgerWriter, recorder: Recorder) -> None:
    """Three steps with two checkpoints, a second term, and groups in every state; the segments are followed by others."""
    buffer = buffer_on(ledger)
    assert await ledger.begin_term() == 1
    make_ready(buffer, 0, 1)
    await recorder.flushed(ledger)
    train(buffer, 0)
    make_ready(buffer, 2, 3)
    ledger.record(Note(key="stream", value=b"1"))
    await recorder.flushed(ledger)
    await recorder.checkpoint(ledger, 1)
    await recorder.flushed(ledger)
    train(buffer, 1)
    make_ready(buffer, 4, 5)
    await recorder.flushed(ledger)
    assert await ledger.begin_term() == 2
    buffer.admit(ticket(6))
    buffer.dispatch(6, "rollout-0")
    await recorder.flushed(ledger)
    train(buffer, 2)
    make_ready(buffer, 7)
    ledger.record(Note(key="stream", value=b"2"))
    await recorder.flushed(ledger)
    await recorder.checkpoint(ledger, 3)
    buffer.lose(6)
    make_ready(buffer, 6, 8)
    buffer.drop(7, "run ended")
    await recorder.flushed(ledger)


def cut(moment: Moment, chance: random.Random) -> dict[str, bytes]:
    """One of the states in which a disk may be that has been told to write `moment`, and to sync what is synced of it."""
    files = {}
    for name, data in moment.files.items():
        safe = moment.synced.get(name, 0) if name != DATABASE else len(data)  # this one SQLite syncs by itself
        how = chance.choice(("whole", "prefix", "holes"))
        if how == "prefix":
            data = data[: chance.randint(safe, len(data))]
        elif how == "holes":  # the file's length is there, and of what it holds some sectors alone
            torn = bytearray(data)
            for at in range(safe, len(data), SECTOR):
                if chance.random() < 0.3:
                    end = min(at + SECTOR, len(data))
                    torn[at:end] = bytes(end - at)
            data = bytes(torn)
        files[name] = data
    return files


@pytest.fixture
def moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Moment]:
    """Each transaction of a ledger, from the first on."""
    recorder = Recorder(tmp_path / "written", monkeypatch)
    with_ledger(recorder.folder, lambda ledger: live(ledger, recorder), SEGMENT)
    monkeypatch.undo()
    return recorder.moments


def test_after_a_power_cut_what_was_synced_is_there_and_the_rest_whole_or_not(moments: list[Moment], tmp_path: Path) -> None:
    chance, lost, torn = random.Random(7), 0, 0
    assert len({name for moment in moments for name in moment.files if name.startswith("segment")}) > 3
    for number, moment in enumerate(moments):
        # A sync comes at once after a moment, so that the state which it made durable is the one before the first that has it.
        first = next(i for i, one in enumerate(moments) if one.synced[WAL] == moment.synced[WAL])
        possible = [one.says for one in moments[max(0, first - 1) : number + 1]] + [{}] * (first == 0)
        for attempt in range(CUTS):
            folder = tmp_path / f"{number}-{attempt}"
            folder.mkdir()
            for name, data in cut(moment, chance).items():
                (folder / name).write_bytes(data)
            with LedgerReader(folder) as reader:
                found = told(reader)
            assert found in possible, (number, attempt)
            lost += found != moment.says
            torn += with_ledger(folder, recovered(moment, folder), SEGMENT)
    assert lost > len(moments) and torn > len(moments), "too few cuts lose anything"


def recovered(moment: Moment, folder: Path) -> Callable[[LedgerWriter], object]:
    """Go back to the newest checkpoint, and on to the end; returns how many groups were to be made again."""

    async def use(ledger: LedgerWriter) -> int:
        assert await ledger.begin_term() > int(moment.notes["term"]), "a term is never given twice"
        with LedgerReader(folder) as reader:
            before = list(reader.groups())
        restored = await ledger.restore(moment.checkpoint, moment.trained, NEEDS)
        await check_payloads(ledger, restored.groups)
        known = {row.group_id for row in before}
        covered = {i for low, high in moment.trained for i in range(low, high + 1)}
        assert covered <= known, "what a checkpoint names is known"
        live = [row.group_id for row in restored.groups]
        assert len(live) == len(set(live)) and not covered & set(live), "trained once"
        assert {row.group_id for row in before if row.phase != Phase.DROPPED} == covered | set(live), "none is lost"
        buffer = buffer_on(ledger, step=moment.checkpoint)
        buffer.load(restored.groups)
        waiting = [row.group_id for row in restored.groups if row.phase == Phase.ADMITTED]
        make_ready(buffer, *waiting)
        await ledger.flush()
        with LedgerReader(folder) as reader:
            assert {row.phase for row in reader.groups()} <= {Phase.READY, Phase.RETIRED, Phase.DROPPED}
            await check_payloads(ledger, [row for row in reader.groups() if row.phase == Phase.READY])
        return len(waiting)

    return use


async def check_payloads(ledger: LedgerWriter, groups: list[GroupRow]) -> None:
    """What is said to be made can be read, and is that group's."""
    for row in groups:
        if row.phase == Phase.READY:
            assert await ledger.bytes_of(row.handles["payload"]) == b"payload %d" % row.group_id
            assert await ledger.bytes_of(row.handles["reference"]) == b"reference %d" % row.group_id


def test_a_ledger_without_a_column_of_later_versions_is_gone_on_with(tmp_path: Path) -> None:
    async def begin(ledger: LedgerWriter) -> None:
        make_ready(buffer_on(ledger), 0)

    async def go_on(ledger: LedgerWriter) -> None:
        make_ready(buffer_on(ledger), 1)

    with_ledger(tmp_path, begin)
    with closing(sqlite3.connect(tmp_path / DATABASE)) as database:
        database.execute("ALTER TABLE groups DROP COLUMN holders")
    with LedgerReader(tmp_path) as reader:
        assert [row.holders for row in reader.groups(states=())] == [None]
    with_ledger(tmp_path, go_on)
    with LedgerReader(tmp_path) as reader:
        assert [row.holders for row in reader.groups(states=())] == [None, []]
