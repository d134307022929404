"""The records of the ledger, and their columns. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct, field, structs

from runtime import types
from runtime.ledger.payloads import Handle
from runtime.ledger.reader import MARKS, PARTS, GroupRow
from runtime.ledger.states import GroupState, Phase
from runtime.types import GeneratedGroup, Scores


class Ticket(Struct, frozen=True, kw_only=True):
    """The constant data of a group, from its admission on. `group_id` is its ordinal in the prompt stream."""

    group_id: int
    problem: int  # index of its prompt in the data
    source: str
    label: str
    seed: int  # in [0, 2^63)


class Record(Struct, kw_only=True):
    """A record to write. `handles`: where the ledger's thread has put the record's parts, by name."""

    handles: dict[str, Handle] = field(default_factory=dict)


class Change(Record, kw_only=True):
    """A group entered `state` at `at` (seconds since the epoch), with new data. `stamp`: the time column for `at`, or ""."""

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


class CheckpointSaved(Record, kw_only=True):
    step: int
    incarnation: int
    path: str
    at: float


class Note(Record, kw_only=True):
    """The newest value of a key. Written in one transaction with the records around it."""

    key: str
    value: bytes


class Restored(Struct, kw_only=True):
    """The state after going back to a checkpoint. `incarnation` is new, and durable before it is returned. `damaged`: see
    `LedgerWriter.restore`. `following`: the lowest unused group id."""

    groups: list[GroupRow]
    incarnation: int
    damaged: bool
    following: int


_TIMES = [phase.value for phase in Phase]
_GENERATED = ("oldest", "newest", "prompt_tokens", "response_tokens", "truncated", "rewards", "outcomes")
_LATER = ("reward", "scores", "replica", "due")


LOST = "lost with a part of the ledger"  # the reason for dropping such groups


def unknown_columns(group_id: int, step: int) -> dict[str, Any]:
    """Return the columns of a missing group that a checkpoint names as trained before `step`."""
    known = {"id": group_id, "state": Phase.RETIRED.value, "step": step - 1, "taken": step - 1}
    return known | {"problem": -1, "source": "", "label": "", "seed": 0, "marks": 0}


def parts(record: Record) -> dict[str, bytes]:
    """Return the parts of a record that go into the segment files."""
    if not isinstance(record, Change):
        return {}
    payload = None if record.generated is None else record.generated.payload
    parts = {"payload": payload, "reference": record.reference, "values": record.values}
    return {part: data for part, data in parts.items() if data is not None}


def _generated_columns(generated: GeneratedGroup) -> dict[str, Any]:
    return {
        "oldest": generated.oldest.pack(),
        "newest": generated.newest.pack(),
        "prompt_tokens": generated.prompt_tokens,
        "response_tokens": types.encode(generated.response_tokens),
        "truncated": generated.truncated,
        "rewards": types.encode(generated.rewards),
        "outcomes": None if generated.outcomes is None else types.encode(generated.outcomes),
    }


def _scores_columns(scores: Scores) -> dict[str, Any]:
    valid = scores.rewards[scores.valid.astype(bool)]
    return {"reward": float(np.mean(valid)) if valid.size else None, "scores": types.encode(scores)}


def ticket_columns(ticket: Ticket) -> dict[str, Any]:
    columns = structs.asdict(ticket)
    return {"id": columns.pop("group_id"), **columns}


def state_columns(state: GroupState) -> dict[str, Any]:
    return {"state": state.phase.value, "marks": int(state.marks), "step": state.step, "why": state.why}


def forgotten(phase: Phase) -> dict[str, Any]:
    """Return the columns to clear for a group that went back to `phase`."""
    names = ["taken", "place"]
    names += [f"{later}_at" for later in _TIMES[_TIMES.index(phase.value) + 1 :]]
    if phase == Phase.ADMITTED:
        names += [*_GENERATED, *_LATER, *(f"{mark}_at" for mark in MARKS)]
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
    columns |= {
        name: value for name in ("replica", "attempt", "due", "taken", "place") if (value := getattr(change, name)) is not None
    }
    if change.generated is not None:
        columns |= _generated_columns(change.generated)
    if change.scores is not None:
        columns |= _scores_columns(change.scores)
    for part, handle in change.handles.items():
        columns |= {f"{part}_segment": handle.segment, f"{part}_offset": handle.offset, f"{part}_length": handle.length}
    return columns
