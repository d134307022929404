"""The ledger while a run goes on: what was recorded can be read, and storage that fails loses nothing."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
from msgspec import structs

from runtime import timeouts
from runtime.coordinator.buffer import Buffer
from runtime.coordinator.group import restored
from runtime.errors import InvariantViolated, UserError
from runtime.ledger.journal import LedgerWriter
from runtime.ledger.payloads import segment_path
from runtime.ledger.reader import DATABASE, LedgerReader
from runtime.ledger.records import CheckpointSaved, Note
from runtime.ledger.states import Phase
from runtime.types import Outcomes
from tests.unit.ledger_cases import NEEDS, buffer_on, make_ready, train, with_ledger
from tests.unit.test_buffer import KeptChanges, generated, ticket

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
        assert [r.group_id for r in reader.groups(reward=(0.4, 0.6))][:3] == [0, 1, 2]
        assert not list(reader.groups(reward=(0.6, 1.0)))
        assert reader.dropped() == {"end of run": 1}
        assert reader.note("stream") == b"position"
        assert [c.path for c in reader.checkpoints()] == ["checkpoints/2"]


def test_what_became_of_episodes_is_read_as_it_was_written(tmp_path: Path) -> None:
    outcomes = Outcomes(
        environment="maze",
        reasons=["completed", "left out: slow"],
        turns=[3, 0],
        log={"moves": (1, 2.5)},
        repeated={"environment-0: it was lost": 2},
    )

    async def run(ledger: LedgerWriter) -> None:
        buffer = buffer_on(ledger)
        for group_id, told in ((0, outcomes), (1, None)):
            buffer.admit(ticket(group_id))
            buffer.dispatch(group_id, "gateway-0")
            buffer.generated(structs.replace(generated(group_id, 0), outcomes=told))

    with_ledger(tmp_path, run)
    with LedgerReader(tmp_path) as reader:
        played, replies = reader.groups()
    assert (played.outcomes, replies.outcomes) == (outcomes, None)
    group = restored(played, NEEDS, 0.0, 2)
    assert group.generated is not None and group.generated.outcomes == outcomes


def test_reading_while_the_run_goes_on(tmp_path: Path) -> None:
    async def run(ledger: LedgerWriter) -> None:
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
    async def run(ledger: LedgerWriter) -> None:
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


# -------------------------------------------------------------------------------------------------------------- writing


async def until_waits(ledger: LedgerWriter, why: str) -> None:
    """Until `ledger` says that it waits for room, with the path and the bytes that it needs."""
    while not ledger.waits:  # noqa: ASYNC110 - the ledger tells nobody
        await asyncio.sleep(0)
    assert re.match(rf"waits until [\d,]+ bytes can be written to {ledger.folder}: .*{why}", ledger.waits)


def test_run_flushes_by_itself_and_waits_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "DISK_RETRY", 0.01)

    async def run(ledger: LedgerWriter) -> None:
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

        monkeypatch.setattr("runtime.ledger.payloads.os.pwrite", scarce)
        make_ready(buffer, 1)
        await until_waits(ledger, "no space left on device")
        make_ready(buffer, 2)
        with LedgerReader(tmp_path) as reader:
            assert reader.counts()["ready"] == 1
        room[0] = True
        await flush()
        assert not ledger.waits
        task.cancel()
        with LedgerReader(tmp_path) as reader:
            assert reader.counts()["ready"] == 3, "nothing was lost"
            assert [reader.read(row.handles["payload"]) for row in reader.groups()] == [b"payload %d" % i for i in range(3)]

    with_ledger(tmp_path, run)


def test_a_full_database_rolls_the_whole_tick_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "DISK_RETRY", 0.01)

    async def run(ledger: LedgerWriter) -> None:
        buffer = buffer_on(ledger)
        await ledger.flush()
        database = ledger._writer._database
        (pages,) = await ledger._call("test", lambda _: database.execute("PRAGMA page_count").fetchone())
        await ledger._call("test", lambda _: database.execute(f"PRAGMA max_page_count = {pages + 2}").fetchall())
        make_ready(buffer, *range(300))
        flushing = asyncio.create_task(ledger.flush())
        await until_waits(ledger, "no space left on device")
        with LedgerReader(tmp_path) as reader:
            assert sum(reader.counts().values()) == 0
        size = segment_path(tmp_path, 0).stat().st_size
        await ledger._call("test", lambda _: database.execute("PRAGMA max_page_count = 100000").fetchall())
        await flushing
        assert segment_path(tmp_path, 0).stat().st_size == size, "payloads are not written twice"

    with_ledger(tmp_path, run)
    with LedgerReader(tmp_path) as reader:
        assert reader.counts()["ready"] == 300


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
        with pytest.raises(UserError, match="in use by another coordinator"):
            await LedgerWriter.open(tmp_path, 100)
        other = Buffer(needs=NEEDS, groups_per_step=1, staleness=0, journal=KeptChanges(), clock=time.time)
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


def test_a_locked_database_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "DISK_RETRY", 0.01)
    monkeypatch.setattr("runtime.timeouts.LEDGER_LOCK", 0.01)

    async def run(ledger: LedgerWriter) -> None:
        other = sqlite3.connect(tmp_path / DATABASE, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        buffer_on(ledger).admit(ticket(0))
        flushing = asyncio.create_task(ledger.flush())
        await until_waits(ledger, "locked")
        other.execute("ROLLBACK")
        other.close()
        await flushing

    with_ledger(tmp_path, run)
    with LedgerReader(tmp_path) as reader:
        assert reader.counts()["admitted"] == 1
