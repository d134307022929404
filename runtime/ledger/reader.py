"""The schema of the ledger's database, and its reader: for a running or a finished run."""

from __future__ import annotations

import os
import re
import sqlite3
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from msgspec import Struct

from runtime import run_files, types
from runtime.errors import InvalidMessage, InvariantViolated, SluiceError, UserError
from runtime.ledger import checkpoint
from runtime.ledger.states import Mark, Phase
from runtime.run_files import regular
from runtime.types import Holder, Outcomes, PolicyVersion, Scores

# ---- Payloads
# A segment `segment-00000.bin` is a sequence of records: length (uint64) and xxh3-64 of the bytes (uint64), little-endian, then
# the bytes. A record is never changed; whole segments are deleted once none of their records is needed.

RECORD = struct.Struct("<QQ")
_SEGMENT = re.compile(r"segment-(\d{5,})\.bin")


class PayloadLost(SluiceError):
    """A record is missing, torn or altered: its content has to be made again."""


class Handle(Struct, frozen=True, array_like=True):
    """The position of a record: `offset` of its header, `length` of its bytes."""

    segment: int
    offset: int
    length: int


def segment_path(folder: Path, segment: int) -> Path:
    return folder / f"segment-{segment:05d}.bin"


def segments(folder: Path) -> dict[int, int]:
    """Return the segments in `folder` and their sizes in bytes, oldest first."""
    found = ((match, path) for path in folder.iterdir() if (match := _SEGMENT.fullmatch(path.name)))
    return dict(sorted((int(match[1]), path.stat().st_size) for match, path in found))


def read_payload(folder: Path, handle: Handle) -> bytes:
    """Read one record. Raises PayloadLost. Any thread or process may read while a store appends."""
    path = segment_path(folder, handle.segment)
    try:
        with regular(path, None).open("rb", buffering=0) as file:
            whole = 0 <= handle.length <= os.fstat(file.fileno()).st_size and handle.offset >= 0  # False for a damaged row
            record = os.pread(file.fileno(), RECORD.size + handle.length, handle.offset) if whole else b""
    except FileNotFoundError:
        raise PayloadLost(f"{path.name} is gone") from None
    if len(record) == RECORD.size + handle.length:
        length, checksum = RECORD.unpack_from(record)
        data = record[RECORD.size :]
        if length == handle.length and xxhash.xxh3_64_intdigest(data) == checksum:
            return data
    raise PayloadLost(f"{path.name}: the record at {handle.offset} of {handle.length} bytes is torn")


# ---- Groups

Ranges = list[tuple[int, int]]
"""Group ids, as disjoint ranges in order, both ends included."""

DATABASE = "ledger.sqlite"
FORMAT = 5  # kept as the user_version; changes with the columns or the payloads
PARTS = ("payload", "reference", "values")  # the data of a group in the segment files
MARKS = ("scored", "referenced", "valued")

_HANDLES = {part: f"{part}_segment INTEGER, {part}_offset INTEGER, {part}_length INTEGER" for part in PARTS}

# In one transaction, so no reader or crash leaves tables without their format.
SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS groups (
    id INTEGER PRIMARY KEY, problem INTEGER NOT NULL, source TEXT NOT NULL, label TEXT NOT NULL,
    seed INTEGER NOT NULL, state TEXT NOT NULL, marks INTEGER NOT NULL, why TEXT, step INTEGER, taken INTEGER, place INTEGER,
    replica TEXT, attempt INTEGER NOT NULL DEFAULT 0, due INTEGER, oldest INTEGER, newest INTEGER, prompt_tokens INTEGER,
    response_tokens BLOB, truncated INTEGER, rewards BLOB, outcomes BLOB, holders BLOB, reward REAL, scores BLOB,
    {", ".join(_HANDLES.values())},
    {", ".join(f"{name}_at REAL" for name in (*(phase.value for phase in Phase), *MARKS, "lost"))}
);
CREATE INDEX IF NOT EXISTS groups_by_step ON groups(step);
CREATE INDEX IF NOT EXISTS groups_live ON groups(state) WHERE state NOT IN ('retired', 'dropped');
CREATE TABLE IF NOT EXISTS checkpoints (
    step INTEGER PRIMARY KEY, incarnation INTEGER NOT NULL, path TEXT NOT NULL, at REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value BLOB NOT NULL);
PRAGMA user_version = {FORMAT};
COMMIT;
"""


class GroupRow(Struct, kw_only=True):
    """A row of the ledger for one group. `group_id` is its ordinal, `problem` the index of its prompt in the data."""

    group_id: int
    problem: int
    source: str
    label: str
    seed: int
    phase: Phase
    marks: Mark
    why: str | None
    step: int | None
    taken: int | None  # the step of its batch, set before it is consumed
    place: int | None  # the index in this batch
    replica: str | None
    attempt: int  # the number of dispatches
    due: int | None  # the last step that may take it, as known at the dispatch
    oldest: PolicyVersion | None
    newest: PolicyVersion | None
    prompt_tokens: int | None
    response_tokens: list[int] | None  # [rows]
    truncated: int | None
    rewards: list[float] | None  # [n], see GeneratedGroup
    outcomes: Outcomes | None
    holders: list[Holder] | None  # of the payload's blob, see GeneratedGroup
    reward: float | None  # mean of the valid episodes
    scores: Scores | None
    handles: dict[str, Handle]  # by PARTS
    times: dict[str, float]  # seconds since the epoch, by phase or mark


class CheckpointSaved(Struct, kw_only=True):
    """A row of the ledger for one checkpoint."""

    step: int
    incarnation: int
    path: str
    at: float


def check_format(database: sqlite3.Connection, folder: Path) -> None:
    """Raise UserError if the database has a ledger of another format. An empty database is allowed."""
    (found,) = database.execute("PRAGMA user_version").fetchone()
    if found != FORMAT and database.execute("SELECT 1 FROM sqlite_master").fetchone():
        raise UserError(f"{folder}: the ledger is of format {found}, and this version of Sluice reads format {FORMAT} only")


_BLOBS: dict[str, Any] = {
    "response_tokens": list[int],
    "rewards": list[float],
    "outcomes": Outcomes,
    "holders": list[Holder],
    "scores": Scores,
}


def group_row(row: sqlite3.Row) -> GroupRow:
    """Decode a row of `SELECT * FROM groups`. Raises LedgerDamaged."""
    known = {name: row[name] for name in row.keys() if row[name] is not None}  # noqa: SIM118
    plain: dict[str, Any] = {name: known.get(name) for name in GroupRow.__struct_fields__}
    try:
        plain |= {name: PolicyVersion.unpack(known[name]) for name in ("oldest", "newest") if name in known}
        plain |= {name: types.decode(kind, known[name]) for name, kind in _BLOBS.items() if name in known}
        plain |= {
            "group_id": row["id"],
            "phase": Phase(row["state"]),
            "marks": Mark(row["marks"]),
            "handles": {
                part: Handle(row[f"{part}_segment"], row[f"{part}_offset"], row[f"{part}_length"])
                for part in PARTS
                if f"{part}_segment" in known
            },
            "times": {name[:-3]: at for name, at in known.items() if name.endswith("_at")},
        }
        return GroupRow(**plain)
    except (InvalidMessage, ArithmeticError, TypeError, ValueError) as error:
        raise LedgerDamaged(f"{DATABASE}: the row of group {row['id']!r} is damaged: {error}") from error


def groups_within(trained: Ranges) -> int:
    return sum(high - low + 1 for low, high in trained)


def missing(database: sqlite3.Connection, trained: Ranges) -> list[int]:
    """Return the ids of the groups in `trained` that have no row."""
    found: list[int] = []
    for low, high in trained:
        within = (low, high)
        (rows,) = database.execute("SELECT count(*) FROM groups WHERE id BETWEEN ? AND ?", within).fetchone()
        if rows <= high - low:
            here = {row[0] for row in database.execute("SELECT id FROM groups WHERE id BETWEEN ? AND ?", within)}
            found += [group_id for group_id in range(low, high + 1) if group_id not in here]
    return found


class LedgerDamaged(UserError):
    """The file is no database, or is incomplete."""


class LedgerReader:
    """Read-only view of the ledger in `folder`. Raises UserError if there is none, and at the end of a `with` if SQLite could
    not read: a run has no tables before it has begun."""

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)
        path = self.folder / DATABASE
        if not path.exists():
            raise UserError(f"{self.folder}: no ledger here; a run's ledger is {DATABASE}")
        for file in filter(Path.exists, (path, *(path.with_name(f"{DATABASE}-{kind}") for kind in ("wal", "shm")))):
            regular(file, None)
        # SQLite writes files beside a database in WAL mode even to read it, but not if it was closed and has no WAL.
        frozen = not os.access(self.folder, os.W_OK) and not path.with_name(f"{DATABASE}-wal").exists()
        uri = f"{path.absolute().as_uri()}?{'immutable=1' if frozen else 'mode=ro'}"
        with ExitStack() as undo:
            try:
                self._connection = undo.enter_context(closing(sqlite3.connect(uri, uri=True)))
                self._connection.row_factory = sqlite3.Row
                check_format(self._connection, self.folder)
            except sqlite3.Error as error:
                raise self._unreadable(error) from error
            undo.pop_all()

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> LedgerReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        self.close()
        if isinstance(error, sqlite3.Error):
            raise self._unreadable(error) from error

    def _unreadable(self, error: sqlite3.Error) -> UserError:
        kind = UserError if isinstance(error, sqlite3.OperationalError) else LedgerDamaged
        return kind(f"{self.folder}: the ledger cannot be read: {error}")

    def groups(
        self,
        *,
        group_id: int | None = None,
        steps: tuple[int, int] | None = None,
        states: Sequence[Phase] = (),
        reward: tuple[float, float] | None = None,
    ) -> Iterator[GroupRow]:
        """Return the groups that meet every filter, by id. Ranges include both ends; `reward` is the group's mean."""
        filters: dict[str, Sequence[Any]] = {  # a filter without values is not applied
            "id = ?": () if group_id is None else (group_id,),
            "step BETWEEN ? AND ?": steps or (),
            f"state IN ({', '.join('?' * len(states))})": [state.value for state in states],
            "reward BETWEEN ? AND ?": reward or (),
        }
        where = " AND ".join(term for term, values in filters.items() if values) or "1"
        found = self._connection.execute(f"SELECT * FROM groups WHERE {where} ORDER BY id", [*chain(*filters.values())])
        return map(group_row, found)

    def times(self) -> dict[str, np.ndarray]:
        """Return when groups entered each phase: by phase, float64 [groups] by id, seconds since the epoch, NaN for never."""
        rows = self._connection.execute(f"SELECT {', '.join(f'{phase.value}_at' for phase in Phase)} FROM groups ORDER BY id")
        table = np.array([tuple(row) for row in rows], np.float64).reshape(-1, len(Phase))
        return {phase.value: table[:, at] for at, phase in enumerate(Phase)}

    def checkpoints(self) -> list[CheckpointSaved]:
        rows = self._connection.execute("SELECT * FROM checkpoints ORDER BY step")
        return [CheckpointSaved(**dict(row)) for row in rows]

    def check_whole(self) -> None:
        """Raise LedgerDamaged if SQLite finds broken pages, or if a state is unknown."""
        (why,) = self._connection.execute("PRAGMA quick_check(1)").fetchone()
        if why == "ok" and self._has_tables:
            known = ", ".join(f"'{phase.value}'" for phase in Phase)
            odd = self._connection.execute(f"SELECT id, state FROM groups WHERE state NOT IN ({known})").fetchone()
            why = "ok" if odd is None else f"group {odd['id']} is {odd['state']!r}"
        if why != "ok":
            raise LedgerDamaged(f"{self.folder}: the ledger cannot be read: {why}")

    def missing(self, trained: Ranges) -> int:
        """Return how many of these groups are missing."""
        return len(missing(self._connection, trained)) if self._has_tables else groups_within(trained)

    @property
    def _has_tables(self) -> bool:
        """Whether the tables exist: they do not before the run has begun."""
        return self._connection.execute("SELECT 1 FROM sqlite_master").fetchone() is not None

    def trained(self) -> bool:
        """Return True if a step was ever trained, or a checkpoint saved."""
        if not self._has_tables:
            return False
        (found,) = self._connection.execute(
            "SELECT EXISTS (SELECT 1 FROM groups WHERE state IN ('consumed', 'retired')) OR EXISTS (SELECT 1 FROM checkpoints)"
        ).fetchone()
        return bool(found)

    def newest_step(self) -> int | None:
        """Return the last step whose groups retired, or None."""
        found: int | None
        (found,) = self._connection.execute("SELECT max(step) FROM groups WHERE state = 'retired'").fetchone()
        return found

    def counts(self) -> dict[str, int]:
        """Count the groups in each phase, 0 included."""
        found = dict(self._connection.execute("SELECT state, count(*) FROM groups GROUP BY state").fetchall())
        return {phase.value: found.get(phase.value, 0) for phase in Phase}

    def dropped(self) -> dict[str, int]:
        """Count the dropped groups by reason."""
        query = "SELECT why, count(*) FROM groups WHERE state = 'dropped' GROUP BY why ORDER BY why"
        return dict(self._connection.execute(query).fetchall())

    def note(self, key: str) -> bytes | None:
        """Return the newest value recorded under `key`."""
        row = self._connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else bytes(row["value"])

    def read(self, handle: Handle) -> bytes:
        """Read a payload. Raises PayloadLost if it is no longer kept."""
        return read_payload(self.folder, handle)

    def check_final(self, groups_per_step: int | None = None) -> dict[str, int]:
        """Return the counts of a finished run. Raises InvariantViolated with group ids unless every admitted group has exactly
        one final state. With `groups_per_step`, every step must have trained that many, without a gap between steps."""
        checks = {
            "groups that did not end in a final state": "id FROM groups WHERE state NOT IN ('retired', 'dropped') ORDER BY id",
            "groups that have more than one final state, or none": "id FROM groups WHERE (state = 'retired') != (step IS NOT"
            " NULL) OR (state = 'dropped') != (why IS NOT NULL) OR retired_at + dropped_at IS NOT NULL ORDER BY id",
        }
        if groups_per_step is not None:
            checks |= {
                f"steps that did not train on {groups_per_step} groups": "step FROM groups WHERE state = 'retired' GROUP BY"
                f" step HAVING count(*) != {int(groups_per_step)} OR count(DISTINCT place) != count(*) ORDER BY step",
                "steps whose predecessor trained on nothing": "step FROM (SELECT step, lag(step, 1, -1) OVER (ORDER BY step) AS"
                " previous FROM (SELECT DISTINCT step FROM groups WHERE state = 'retired')) WHERE step != previous + 1",
            }
        for complaint, query in checks.items():
            if found := [str(row[0]) for row in self._connection.execute(f"SELECT {query}")]:
                more = f" and {len(found) - 20} more" if len(found) > 20 else ""
                raise InvariantViolated(f"{complaint}: {', '.join(found[:20])}{more}")
        return self.counts()


# ---- A ledger that lacks groups of the run's checkpoint, from which alone the coordinator then goes on (`Attempt._restore`)


def examine(run_dir: Path, resume: Path, say: Callable[[str], None]) -> None:
    """Check the ledger before the run goes on from its own checkpoint `resume`. An unreadable ledger is set aside; `say` gets
    messages. Raises UserError for a ledger of another format."""
    folder, position = run_dir / run_files.LEDGER, checkpoint.read_position(resume)
    known = lost = groups_within(position.trained)
    try:
        if (folder / DATABASE).exists():
            with LedgerReader(folder) as ledger:
                ledger.check_whole()
                lost = ledger.missing(position.trained)
    except LedgerDamaged as error:
        aside = next(path for n in count(1) if not (path := run_dir / f"ledger.broken-{n}").exists())
        folder.replace(aside)
        say(f"{error}; it is set aside as {aside.name}, and another begun")
    if lost:
        found = f"{lost} of the {known} groups that {resume.name} has trained are missing"
        say(f"{folder}: {found}: they are not trained again, and only their ids are known")
