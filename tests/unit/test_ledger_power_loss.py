"""The ledger after a power cut: of what was written since the last sync any part may be on the disk, in any order (as in
Pillai et al., "All file systems are not created equal", OSDI 2014). What was synced is there, and of the rest a transaction is
there whole or not at all."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import Struct

from runtime.ledger import journal
from runtime.ledger.journal import LedgerWriter
from runtime.ledger.reader import DATABASE, GroupRow, LedgerReader
from runtime.ledger.records import CheckpointSaved, Note
from runtime.ledger.states import Phase
from tests.unit.ledger_cases import NEEDS, buffer_on, make_ready, train, with_ledger
from tests.unit.test_buffer import ticket

SECTOR = 512  # bytes that a disk writes whole or not at all
SEGMENT = 80  # bytes: two or three records
CUTS = 24  # for each moment
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

        monkeypatch.setattr("runtime.ledger.payloads.os.fsync", seen)
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


def test_after_a_power_cut_what_was_synced_is_there_and_the_rest_is_there_whole_or_not_at_all(
    moments: list[Moment], tmp_path: Path
) -> None:
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
