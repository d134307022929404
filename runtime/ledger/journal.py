"""The ledger: the journal of every group, in SQLite (WAL), with the payloads in segment files beside it.

`record` only appends to a list. A flush hands the list to the ledger's one thread. This thread writes the payloads first and
then everything else in one transaction, so that no row points to a missing payload. A record whose write failed stays in the
list for the next flush: no record is lost or written twice.

Durability: flushed data survives the death of the process. A power cut may undo the last transactions (synchronous = NORMAL)
or tear their payloads; `trained`, called for every checkpoint, makes everything before it durable (fsync).

The schema and the reading side are in `runtime.ledger.reader`.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import sqlite3
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import xxhash
from msgspec import Struct, field, structs

from runtime import run_files, timeouts, types
from runtime.errors import InUse, InvariantViolated, ServiceFault, StorageFull
from runtime.ledger import reader, states
from runtime.ledger.reader import PARTS, CheckpointSaved, GroupRow, Handle, PayloadLost, Ranges, group_row, segments
from runtime.ledger.states import GroupState, Mark, Phase
from runtime.types import GeneratedGroup, PolicyVersion, Scores

# ---- The records of the ledger, and their columns


class Ticket(Struct, frozen=True, kw_only=True):
    """The constant data of a group, from its admission on. `group_id` is its ordinal in the prompt stream."""

    group_id: int
    problem: int  # index of its prompt in the data
    source: str
    label: str
    seed: int  # in [0, 2^63)


class Change(Struct, kw_only=True):
    """A group entered `state` at `at` (seconds since the epoch), with new data. `stamp`: the time column for `at`, or "".
    `handles`: where the ledger's thread has put the parts, by name."""

    group_id: int
    state: GroupState
    stamp: str
    at: float
    ticket: Ticket | None = None
    replica: str | None = None
    attempt: int | None = None
    due: int | None = None  # the last step that may take it, as known at the dispatch
    taken: int | None = None  # the step of its batch
    place: int | None = None  # the index in this batch
    generated: GeneratedGroup | None = None
    scores: Scores | None = None
    reference: bytes | None = None
    values: bytes | None = None
    handles: dict[str, Handle] = field(default_factory=dict)

    def parts(self) -> dict[str, bytes]:
        payload = None if self.generated is None else self.generated.payload
        parts = {"payload": payload, "reference": self.reference, "values": self.values}
        return {part: data for part, data in parts.items() if data is not None}


class Note(Struct, kw_only=True):
    """The newest value of a key. Written in one transaction with the records around it."""

    key: str
    value: bytes


Record = Change | CheckpointSaved | Note


class Restored(Struct, kw_only=True):
    """The state after going back to a checkpoint. `incarnation` is new, and durable before it is returned. `damaged`: see
    `LedgerWriter.restore`. `following`: the lowest unused group id."""

    groups: list[GroupRow]
    incarnation: int
    damaged: bool
    following: int


_TIMES = [phase.value for phase in Phase]
_GENERATED = ("oldest", "newest", "prompt_tokens", "response_tokens", "truncated", "rewards", "outcomes", "holders")
_LATER = ("reward", "scores", "replica", "due")


LOST = "lost with a part of the ledger"  # the reason for dropping such groups


def _column(value: Any) -> Any:
    if isinstance(value, PolicyVersion):
        return value.pack()
    return value if value is None or isinstance(value, int) else types.encode(value)


def state_columns(state: GroupState) -> dict[str, Any]:
    return {"state": state.phase.value, "marks": int(state.marks), "step": state.step, "why": state.why}


def forgotten(phase: Phase) -> dict[str, Any]:
    """Return the columns to clear for a group that went back to `phase`."""
    names = ["taken", "place"]
    names += [f"{later}_at" for later in _TIMES[_TIMES.index(phase.value) + 1 :]]
    if phase == Phase.ADMITTED:
        names += [*_GENERATED, *_LATER, *(f"{mark}_at" for mark in reader.MARKS)]
        names += [f"{part}_{column}" for part in PARTS for column in ("segment", "offset", "length")]
    return dict.fromkeys(names)


def change_columns(change: Change) -> dict[str, Any]:
    columns = state_columns(change.state)
    if change.stamp == "lost":
        columns |= forgotten(change.state.phase)
    if change.state.phase == Phase.DROPPED:
        columns |= dict.fromkeys(("taken", "place"))
    if change.state.phase == Phase.READY:
        columns["ready_at"] = change.at
    if change.stamp:
        columns[f"{change.stamp}_at"] = change.at
    plain = ("replica", "attempt", "due", "taken", "place")
    columns |= {name: value for name in plain if (value := getattr(change, name)) is not None}
    if change.generated is not None:
        columns |= {name: _column(getattr(change.generated, name)) for name in _GENERATED}
    if change.scores is not None:
        valid = change.scores.rewards[change.scores.valid.astype(bool)]
        columns |= {"reward": float(np.mean(valid)) if valid.size else None, "scores": types.encode(change.scores)}
    for part, handle in change.handles.items():
        columns |= {f"{part}_segment": handle.segment, f"{part}_offset": handle.offset, f"{part}_length": handle.length}
    return columns


SEGMENT_BYTES = 64 << 20  # of a payload file

T = TypeVar("T")
log = logging.getLogger("sluice")


class LedgerWriter:
    """The writing side; one per folder at a time. Use it from one event loop."""

    def __init__(self, folder: Path, thread: ThreadPoolExecutor, writer: _Writer):
        self.folder, self._thread, self._writer = folder, thread, writer
        self._pending: list[Record] = []
        self._recorded = self._written = 0
        self._writing: asyncio.Task[None] | None = None
        self.waits = ""
        """Why writing is impossible now: the run waits until it is possible. "" if all is well."""
        self._dirty = asyncio.Event()
        self._afterwards: deque[tuple[int, Callable[[], None]]] = deque()  # (records to write first, callback)

    @classmethod
    async def open(cls, folder: Path | str, segment_bytes: int = SEGMENT_BYTES) -> LedgerWriter:
        """Open or create the ledger. Raises InUse if another process has it open, UserError, StorageFull, ServiceFault."""
        thread = ThreadPoolExecutor(1, "ledger")
        try:
            writer = await asyncio.get_running_loop().run_in_executor(
                thread, _guarded, "open", Path(folder), lambda: _Writer(Path(folder), segment_bytes)
            )
        except BaseException:
            thread.shutdown(wait=False)
            raise
        return cls(Path(folder), thread, writer)

    def record(self, record: Record) -> None:
        """Write `record` at the next flush. Never blocks."""
        self._pending.append(record)
        self._recorded += 1
        self._dirty.set()

    def then(self, *callbacks: Callable[[], None]) -> None:
        """Call each callback once everything recorded so far is written."""
        self._afterwards += ((self._recorded, callback) for callback in callbacks)
        self._call_back()

    async def flush(self) -> None:
        """Wait until everything recorded before the call is written. Without room or a file system, `waits` has the reason."""
        target = self._recorded
        while self._written < target:
            if self._writing is None:
                self._writing = asyncio.create_task(self._write_pending())
                self._writing.add_done_callback(lambda task: task.cancelled() or task.exception())  # all callers may be gone
            await asyncio.shield(self._writing)  # cancelling a caller must not interrupt the write

    async def run(self) -> None:
        """Flush what is recorded, at most every `LEDGER_TICK` seconds, until cancelled. Raises what `flush` raises."""
        while True:
            await self._dirty.wait()
            await asyncio.sleep(timeouts.LEDGER_TICK)
            self._dirty.clear()
            try:
                await self.flush()
            except BaseException:
                self._dirty.set()
                raise

    async def bytes_of(self, part: bytes | Handle) -> bytes:
        """Return a payload from memory or disk. Raises PayloadLost."""
        if isinstance(part, bytes):
            return part
        return await self._call("read", lambda writer: reader.read_payload(writer.store.folder, part))

    async def trained(self, step: int) -> Ranges:
        """Return the groups that the checkpoint of `step` names as trained: the batches of all steps before it, also without a
        record of `consumed`. Everything recorded before the call is durable when this returns."""
        await self.flush()
        return await self._call("trained", lambda writer: writer.trained(step))

    async def restore(self, step: int, trained: Ranges, needs: Mark, own: bool = False, behind: bool = False) -> Restored:
        """Go back to the checkpoint of `step`. Its list `trained` counts more than the records, and may name groups of another
        ledger. Return every group that is live again: `ready` or `generated` if its data is intact, even if the dead branch
        consumed it; otherwise `admitted`, with its ordinal and seed.

        The ledger is damaged if the checkpoint is its `own` and names missing groups, or if the ledger is `behind` in another
        way. Then no group is live, and the missing groups are entered as trained."""
        await self.flush()
        return await self._until_possible("restore", lambda writer: writer.restore(step, trained, needs, own, behind))

    async def take_up(self, step: int) -> list[GroupRow]:
        """Return the groups that an earlier coordinator left after `step` steps: live ones, and all of later batches."""
        return await self._until_possible("take up", lambda writer: writer.from_step(step))

    async def begin_term(self) -> int:
        """Begin a term: return one more than the last coordinator's term, durably."""
        return await self._until_possible("begin", lambda writer: writer.begin_term())

    async def trim(self, step: int, retain_bytes: int) -> list[int]:
        """Delete the oldest segments, beyond `retain_bytes`, that no restart from `step` on can need. Return their numbers."""
        await self.flush()
        return await self._call("trim", lambda writer: writer.trim(step, retain_bytes))

    async def note(self, key: str) -> bytes | None:
        """Return the newest value recorded under `key`."""
        await self.flush()
        return await self._call("read", lambda writer: writer.note(key))

    async def close(self) -> None:
        """Write all records and release the folder, also if writing fails."""
        try:
            await self.flush()
        finally:
            try:
                await self._call("close", lambda writer: writer.close())
            finally:
                self._thread.shutdown(wait=False)

    async def _write_pending(self) -> None:
        batch, self._pending = self._pending, []
        try:
            size = sum(len(part) for record in batch if isinstance(record, Change) for part in record.parts().values())
            await self._until_possible("write", lambda writer: writer.write(batch), size)
            self._written += len(batch)
            self._call_back()
        except BaseException:
            self._pending[:0] = batch
            raise
        finally:
            self._writing = None

    async def _until_possible(self, phase: str, function: Callable[[_Writer], T], size: int = 0) -> T:
        """Run `_call` until there is room and the file system works; meanwhile set `waits`. `size`: bytes to be written."""
        while True:
            try:
                result = await self._call(phase, function)
            except (StorageFull, ServiceFault) as error:
                if not self.waits:
                    why = "no space left on device" if isinstance(error, StorageFull) else error.reason
                    self.waits = f"waits until {size:,} bytes can be written to {self.folder}: {why}"
                    log.warning("%s", self.waits)
                await asyncio.sleep(timeouts.DISK_RETRY)
            else:
                if self.waits:
                    log.warning("%s can be written again", self.folder)
                self.waits = ""
                return result

    def _call_back(self) -> None:
        while self._afterwards and self._afterwards[0][0] <= self._written:
            self._afterwards.popleft()[1]()

    async def _call(self, phase: str, function: Callable[[_Writer], T]) -> T:
        """Run `function` on the ledger's thread. While the file system does not answer, set `waits`."""
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._thread, _guarded, phase, self.folder, lambda: function(self._writer))
        await asyncio.wait({work}, timeout=timeouts.DISK_SLOW)
        if work.done():
            return work.result()
        slow = f"which has not answered for {timeouts.DISK_SLOW:g} s ({phase})"
        self.waits = f"waits for the file system of {self.folder}, {slow}"
        log.warning("%s", self.waits)
        try:
            return await work
        finally:
            self.waits = ""


def _guarded(phase: str, folder: Path, function: Callable[[], T]) -> T:
    """Call `function`. Turn its operating-system and database errors into StorageFull or ServiceFault."""
    try:
        return function()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(folder) from error
        raise ServiceFault("ledger", phase, str(error)) from error
    except sqlite3.OperationalError as error:
        if "is full" in str(error):
            raise StorageFull(folder) from error
        raise ServiceFault("ledger", phase, f"{folder / reader.DATABASE}: {error}") from error
    except sqlite3.Error as error:
        raise InvariantViolated(f"ledger: {phase}: {folder / reader.DATABASE}: {error}") from error


class PayloadStore:
    """The segment files that a ledger writes: one store per folder, used from one thread. A new store starts a new segment, so
    it never writes behind a tail that a crash may have torn. Killing the process loses nothing that `append` has written.
    `sync`, the next segment and `close` call fsync; a power cut may tear later records, which their checksums show."""

    _size: int  # of the current segment

    def __init__(self, folder: Path, segment_bytes: int):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.segment_bytes = folder, segment_bytes
        newest = max(segments(folder), default=-1)
        if newest >= 0:
            run_files.sync(reader.segment_path(folder, newest))  # a killed store did not do this
        self._open(newest + 1)

    def append(self, data: bytes) -> Handle:
        """Write one record. Raises OSError, leaving the store unchanged."""
        record = reader.RECORD.pack(len(data), xxhash.xxh3_64_intdigest(data)) + data
        if self._size and self._size + len(record) > self.segment_bytes:
            full = self._fd
            os.fsync(full)
            self._open(self.segment + 1)
            os.close(full)
        left, end = memoryview(record), self._size
        try:
            while left:
                written = os.pwrite(self._fd, left, end)
                left, end = left[written:], end + written
        except OSError:
            os.ftruncate(self._fd, self._size)
            raise
        handle = Handle(self.segment, self._size, len(data))
        self._size = end
        return handle

    def sync(self) -> None:
        os.fsync(self._fd)

    def retain(self, needed: Collection[int], retain_bytes: int) -> list[int]:
        """Delete the oldest segments that are not `needed`, until the rest of them fit into `retain_bytes`. Return the deleted.

        The current segment stays, so that no number is used twice.
        """
        sizes = segments(self.folder)
        candidates = [segment for segment in sizes if segment not in needed and segment != self.segment]
        excess = sum(sizes[segment] for segment in candidates) - retain_bytes
        deleted = []
        for segment in candidates:
            if excess <= 0:
                break
            reader.segment_path(self.folder, segment).unlink()
            excess -= sizes[segment]
            deleted.append(segment)
        return deleted

    def close(self) -> None:
        try:
            os.fsync(self._fd)
        finally:
            os.close(self._fd)

    def _open(self, segment: int) -> None:
        self._fd = os.open(reader.segment_path(self.folder, segment), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self.segment, self._size = segment, 0


_PART_OF = {Mark.REFERENCED: "reference", Mark.VALUED: "values"}


class _Writer:
    """The state of the ledger's thread: the folder's lock, the database, the segment files."""

    def __init__(self, folder: Path, segment_bytes: int):
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as undo:
            lock = undo.enter_context(run_files.open_lock(folder / "ledger.lock"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InUse(f"run.dir: {folder} is in use by another coordinator: {run_files.holder(lock)}") from None
            self._database = undo.enter_context(
                closing(sqlite3.connect(folder / reader.DATABASE, timeouts.LEDGER_LOCK, isolation_level=None))
            )
            self._database.row_factory = sqlite3.Row
            reader.check_format(self._database, folder)
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = NORMAL")
            self._database.executescript(reader.SCHEMA)
            if not self._database.execute("SELECT 1 FROM pragma_table_info('groups') WHERE name = 'holders'").fetchone():
                self._database.execute("ALTER TABLE groups ADD COLUMN holders BLOB")  # of version 0.2
            self.store = undo.enter_context(closing(PayloadStore(folder, segment_bytes)))
            self._open = undo.pop_all()

    def close(self) -> None:
        self._open.close()

    def write(self, batch: list[Record]) -> None:
        changes = [record for record in batch if isinstance(record, Change)]
        for change in changes:
            for part, data in change.parts().items():
                if part not in change.handles:
                    change.handles[part] = self.store.append(data)
        with self._transaction():
            self._write_groups(changes)
            for record in batch:
                if not isinstance(record, Change):
                    self._replace("meta" if isinstance(record, Note) else "checkpoints", structs.asdict(record))

    def note(self, key: str) -> bytes | None:
        row = self._database.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else bytes(row["value"])

    def trained(self, step: int) -> Ranges:
        self.store.sync()
        with self._transaction(durable=True):
            self._replace("meta", {"key": "checkpointing", "value": b"%d" % step})
        rows = self._database.execute(
            "WITH islands AS (SELECT id, id - row_number() OVER (ORDER BY id) AS island FROM groups WHERE taken < ?)"
            " SELECT min(id), max(id) FROM islands GROUP BY island ORDER BY 1",
            (step,),
        )
        return [(low, high) for low, high in rows]

    def restore(self, step: int, trained: Ranges, needs: Mark, own: bool, behind: bool) -> Restored:
        changed: dict[int, dict[str, Any]] = {}
        lost = reader.missing(self._database, trained) if own else []
        damaged = behind or bool(lost)
        for covered, row in self._not_settled(trained):
            before = GroupState(needs, row.phase, row.marks, row.step, row.why)
            last = step - 1 if row.taken is None else row.taken
            after = states.restore(before, last, covered, not covered and not damaged and self._intact(row))
            if damaged and not after.phase.final:
                changed[row.group_id] = forgotten(after.phase) | state_columns(states.apply(after, states.Dropped(LOST)))
            elif covered:  # set `taken` too, since the next checkpoint must name the group again
                changed[row.group_id] = state_columns(after) | {"taken": after.step}
            elif after != before or row.taken is not None:
                changed[row.group_id] = state_columns(after) | forgotten(after.phase)
        incarnation = int(self.note("incarnation") or 0) + 1
        with self._transaction(durable=True):
            self._update(changed)
            for group_id in lost:  # trained before `step`, and nothing else is known
                known = {"id": group_id, "state": Phase.RETIRED.value, "step": step - 1, "taken": step - 1}
                unknown = {"problem": -1, "source": "", "label": "", "seed": 0, "marks": 0}
                self._insert("INSERT", "groups", known | unknown)
            self._replace("meta", {"key": "incarnation", "value": b"%d" % incarnation})
        live = self._database.execute("SELECT * FROM groups WHERE state NOT IN ('retired', 'dropped') ORDER BY id")
        groups = [group_row(row) for row in live]
        (following,) = self._database.execute("SELECT coalesce(max(id) + 1, 0) FROM groups").fetchone()
        return Restored(groups=groups, incarnation=incarnation, damaged=damaged, following=following)

    def from_step(self, step: int) -> list[GroupRow]:
        query = "SELECT * FROM groups WHERE state NOT IN ('retired', 'dropped') OR taken >= ? ORDER BY id"
        return [group_row(row) for row in self._database.execute(query, (step,))]

    def begin_term(self) -> int:
        term = int(self.note("term") or 0) + 1
        with self._transaction(durable=True):
            self._replace("meta", {"key": "term", "value": b"%d" % term})
        return term

    def trim(self, step: int, retain_bytes: int) -> list[int]:
        held = set()
        for part in PARTS:
            for where in ("state NOT IN ('retired', 'dropped')", f"state = 'retired' AND step >= {int(step)}"):
                held |= {row[0] for row in self._database.execute(f"SELECT DISTINCT {part}_segment FROM groups WHERE {where}")}
        return self.store.retain(held, retain_bytes)

    def _not_settled(self, trained: Ranges) -> list[tuple[bool, GroupRow]]:
        """Return every group that is neither dropped nor both trained and retired, each with True if it is trained."""
        self._database.execute("CREATE TEMP TABLE IF NOT EXISTS trained (low INTEGER PRIMARY KEY, high INTEGER NOT NULL)")
        with self._transaction():
            self._database.execute("DELETE FROM trained")
            self._database.executemany("INSERT INTO trained VALUES (?, ?)", trained)
        rows = self._database.execute(
            "SELECT *, id <= coalesce((SELECT high FROM trained WHERE low <= id ORDER BY low DESC LIMIT 1), -1) AS covered"
            " FROM groups WHERE state != 'retired' AND (state != 'dropped' OR covered) OR state = 'retired' AND NOT covered"
        )
        return [(bool(row["covered"]), group_row(row)) for row in rows]

    def _intact(self, row: GroupRow) -> bool:
        """Return True if the payload, and the data of the group's marks, can be read."""
        wanted = {"payload", *(part for mark, part in _PART_OF.items() if mark & row.marks)}
        if not row.handles.keys() >= wanted or (Mark.SCORED & row.marks and row.scores is None):
            return False
        try:
            for part in wanted:
                reader.read_payload(self.store.folder, row.handles[part])
        except PayloadLost:
            return False
        return True

    def _write_groups(self, changes: list[Change]) -> None:
        merged: dict[int, dict[str, Any]] = {}
        admitted: dict[int, dict[str, Any]] = {}
        for change in changes:
            if change.ticket is not None:
                admitted[change.group_id] = structs.asdict(change.ticket)
            merged.setdefault(change.group_id, {}).update(change_columns(change))
        for group_id, columns in admitted.items():
            self._insert("INSERT", "groups", {"id": columns.pop("group_id")} | columns | merged.pop(group_id))
        self._update(merged)

    def _update(self, columns_of: dict[int, dict[str, Any]]) -> None:
        alike: dict[tuple[str, ...], list[int]] = {}
        for group_id, columns in columns_of.items():
            alike.setdefault(tuple(columns), []).append(group_id)
        for names, ids in alike.items():
            query = f"UPDATE groups SET {', '.join(f'{name} = ?' for name in names)} WHERE id = ?"
            cursor = self._database.executemany(query, [(*columns_of[i].values(), i) for i in ids])
            if cursor.rowcount != len(ids):
                raise InvariantViolated(f"the journal changes groups that were never admitted, among {ids[:20]}")

    def _replace(self, table: str, columns: dict[str, Any]) -> None:
        self._insert("INSERT OR REPLACE", table, columns)

    def _insert(self, verb: str, table: str, columns: dict[str, Any]) -> None:
        query = f"{verb} INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"
        self._database.execute(query, tuple(columns.values()))

    @contextmanager
    def _transaction(self, durable: bool = False) -> Iterator[None]:
        """Run the block in one transaction. `durable`: it and all before are on the device at the end."""
        self._database.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._database.execute("COMMIT")
        except BaseException:
            if self._database.in_transaction:  # SQLite rolls back by itself when the device is full
                self._database.execute("ROLLBACK")
            raise
