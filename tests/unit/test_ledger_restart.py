"""The ledger after a crash: what was recorded is there, and a restart loses no group and trains none twice."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from runtime.coordinator.buffer import Buffer
from runtime.coordinator.group import restored
from runtime.ledger.journal import LedgerWriter
from runtime.ledger.payloads import PayloadLost, segment_path
from runtime.ledger.reader import LedgerReader
from runtime.ledger.states import Phase
from tests.unit.ledger_cases import NEEDS, buffer_on, make_ready, train, with_ledger
from tests.unit.test_buffer import generated, ids, scores, ticket

CRASH = """
import asyncio, os, signal, sys
from pathlib import Path
from runtime.ledger.journal import LedgerWriter
from tests.unit.ledger_cases import buffer_on, make_ready, train
from tests.unit.test_buffer import ticket

async def main():
    ledger = await LedgerWriter.open(Path(sys.argv[1]), 300)
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

    assert with_ledger(tmp_path, resume) == {
        **{i: ("ready", 7 * i) for i in (4, 5, 6, 7, 8)},
        **{i: ("admitted", 7 * i) for i in (9, 10)},
    }
    with LedgerReader(tmp_path) as reader:
        assert [(row.group_id, row.step) for row in reader.groups(states=[Phase.RETIRED])] == [
            (0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (5, 2),
        ]  # fmt: skip


def test_a_coordinator_that_takes_over_goes_on_after_the_step_that_was_over_last(tmp_path: Path) -> None:
    """It was at step 2, whose groups were consumed; those of step 3 were taken. What is being generated still is, as
    the same attempt."""
    crash(tmp_path)

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

    with_ledger(tmp_path, go_on)
    with LedgerReader(tmp_path) as reader:
        retired = [(row.group_id, row.step) for row in reader.groups(states=[Phase.RETIRED])]
        assert retired == [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (5, 2)]


def test_what_who_played_gave_survives_the_coordinator(tmp_path: Path) -> None:
    """It is not scored again by asking: the column is all that is left of it."""
    rewards = [0.5, float("nan")]

    async def run(ledger: LedgerWriter) -> None:
        buffer = buffer_on(ledger)
        for group_id, gave in ((0, rewards), (1, [])):
            buffer.admit(ticket(group_id))
            buffer.dispatch(group_id, "gateway-0")
            buffer.generated(structs.replace(generated(group_id, 0), response_tokens=[3, 4, 5], rewards=gave))

    with_ledger(tmp_path, run)
    with LedgerReader(tmp_path) as reader:
        played, replies = (restored(row, NEEDS, 0.0, 2).generated for row in reader.groups())
    assert played is not None and replies is not None
    np.testing.assert_array_equal(played.rewards, rewards)
    assert (played.n, played.response_tokens, replies.n, replies.rewards) == (2, [3, 4, 5], 3, [])


def test_what_waits_for_the_ledger_is_called_once_it_is_written(tmp_path: Path) -> None:
    async def run(ledger: LedgerWriter) -> None:
        called: list[str] = []
        ledger.then(lambda: called.append("nothing to write"))
        assert called == ["nothing to write"]
        buffer = buffer_on(ledger)
        make_ready(buffer, 0)
        ledger.then(lambda: called.append("first"))
        make_ready(buffer, 1)
        ledger.then(lambda: called.append("second"))
        assert called == ["nothing to write"]
        await ledger.flush()
        assert called == ["nothing to write", "first", "second"]

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

    with_ledger(tmp_path, run)
    with LedgerReader(tmp_path) as reader:
        trained = [(row.group_id, row.step) for row in reader.groups(states=[Phase.RETIRED])]
        assert trained == [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (5, 2)]


def test_what_a_checkpoint_names_does_not_depend_on_the_ticks_that_were_lost(tmp_path: Path) -> None:
    async def run(ledger: LedgerWriter) -> None:
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


def test_a_resume_with_fewer_groups_a_step_generates_the_overdue_again(tmp_path: Path) -> None:
    async def run(ledger: LedgerWriter) -> list[int]:
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
    async def run(ledger: LedgerWriter) -> None:
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
@settings(max_examples=30)
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
