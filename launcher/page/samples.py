"""The data for the page's samples: the list of groups, a few lines of each, and one group token by token."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from launcher.commands.samples import samples_of
from runtime import run_files, types
from runtime.config import Config, loading
from runtime.data.tokenizer import Tokenizer
from runtime.ledger.reader import GroupRow, LedgerReader, PayloadLost
from runtime.ledger.states import Phase
from runtime.telemetry import summary
from runtime.types import GroupPayload, Logprobs, PolicyVersion, Sample

SHOWN = 400  # characters of a reply in the list
EXAMINED = 2000  # groups whose texts one request searches
TOKENS = 20_000  # of a reply that are shown one by one
OPEN = (-math.inf, math.inf)  # an open range, which also selects groups without the figure


class SampleFilter(Struct, frozen=True):
    """The groups to select; ranges include both ends. `after`: only groups with a larger id, as a search for a text goes on."""

    states: tuple[str, ...] = ()
    steps: tuple[Any, Any] = OPEN
    reward: tuple[Any, Any] = OPEN
    tokens: tuple[Any, Any] = OPEN  # of a group's longest reply
    source: str = ""
    replica: str = ""
    text: str = ""
    after: int = -1


class SampleReader:
    """Reads the samples of one run. Loads the run's tokenizer with the first text."""

    def __init__(self, folder: Path):
        self._folder = folder

    @cached_property
    def config(self) -> Config:
        return loading.load_recorded(self._folder)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer(self.config.model.path, self.config.model.chat_template)

    def index(self, wanted: SampleFilter) -> dict[str, Any]:
        """Return the groups that `wanted` selects as columns, oldest first. With a text, search only the next EXAMINED groups;
        `next`: the group to go on after, None at the end."""
        with LedgerReader(self._folder / run_files.LEDGER) as reader:
            rows = [row for row in self._selected(reader, wanted) if row.group_id > wanted.after]
            more = None
            if wanted.text:
                more = rows[EXAMINED - 1].group_id if len(rows) > EXAMINED else None
                texts = ((row, samples_of(reader, row, self.tokenizer)) for row in rows[:EXAMINED])
                rows = [
                    row
                    for row, found in texts
                    if any(wanted.text in each.reply or wanted.text in each.prompt for each in found)
                ]
        return {
            "ids": [row.group_id for row in rows],
            "rows": [len(row.response_tokens or ()) for row in rows],
            "steps": [row.step for row in rows],
            "next": more,
        }

    def _selected(self, reader: LedgerReader, wanted: SampleFilter) -> list[GroupRow]:
        ranges = {name: getattr(wanted, name) for name in ("steps", "reward") if getattr(wanted, name) != OPEN}
        found = reader.groups(states=list(map(Phase, wanted.states)), **ranges)
        least, most = wanted.tokens
        return [
            row
            for row in found
            if "payload" in row.handles
            and (not wanted.source or row.source == wanted.source)
            and (not wanted.replica or row.replica == wanted.replica)
            and least <= max(row.response_tokens or [0]) <= most
        ]

    def rows(self, ids: list[int]) -> list[dict[str, Any]]:
        """Return a line for each row of these groups."""
        with LedgerReader(self._folder / run_files.LEDGER) as reader:
            rows = [row for group_id in ids for row in reader.groups(group_id=group_id)]
            lines = [msgspec.to_builtins(each) for row in rows for each in samples_of(reader, row, self.tokenizer)]
        return [{**line, "parts": [], "reply": line["reply"][:SHOWN], "prompt": line["prompt"][-SHOWN:]} for line in lines]

    def group(self, group_id: int) -> dict[str, Any] | None:
        """Return all of one group: its history, and each row token by token. Return None if there is no such group."""
        with LedgerReader(self._folder / run_files.LEDGER) as reader:
            row = next(iter(reader.groups(group_id=group_id)), None)
            if row is None:
                return None
            found = {
                **{name: getattr(row, name) for name in ("group_id", "step", "source", "label", "replica", "attempt", "why")},
                "state": row.phase.value,
                "times": row.times,
                "reasons": [] if row.outcomes is None else row.outcomes.reasons,
                "samples": [],
            }
            if "payload" not in row.handles:
                return found
            found["samples"] = [msgspec.to_builtins(each) for each in samples_of(reader, row, self.tokenizer)]
            trained = {} if row.step is None else _trained(self._folder, row.step, group_id)
            try:
                payload = types.decode(GroupPayload, reader.read(row.handles["payload"]))
            except PayloadLost:
                return found
            reference = _reference(reader, row, payload)
        for at, (line, sample) in enumerate(zip(found["samples"], payload.samples, strict=True)):
            line["tokens_shown"] = self._tokens(sample, None if reference is None else reference[at], trained.get(at, {}))
        return found

    def _texts(self, ids: list[int]) -> list[str]:
        """Return the text of each token. A character of several tokens belongs to its last token."""
        texts, held = [], []
        for token in ids:
            held.append(token)
            text = self.tokenizer.decode(held, skip_special=False)
            whole = not text.endswith("\ufffd") or len(held) == CHARACTER
            texts.append(text if whole else "")
            held = [] if whole else held
        return texts

    def _tokens(
        self, sample: Sample, reference: np.ndarray | None, trained: Mapping[int, tuple[float, float]]
    ) -> list[list[Any]]:
        """Return for each token its text, log-probability as sampled, version, whether it is trained here, the
        log-probabilities of reference and trainer, and the advantage; None for what is not known."""
        shown = slice(0, TOKENS)
        ids = sample.tokens[shown]
        texts = self._texts(ids.tolist())
        versions = [str(PolicyVersion.unpack(int(version))) for version in sample.versions[shown]]
        others = [None] * len(ids) if reference is None else [round(float(each), 4) for each in reference[shown]]
        sampled = [round(float(each), 4) for each in sample.logprobs[shown]]
        masks = sample.loss_mask[shown].tolist()
        own = [trained.get(at, (None, None)) for at in range(len(ids))]
        return [[*each, *more] for *each, more in zip(texts, sampled, versions, masks, others, own, strict=True)]


CHARACTER = 8  # most tokens of one character


def _trained(folder: Path, step: int, group_id: int) -> dict[int, dict[int, tuple[float, float]]]:
    """Return what the trainer kept of a group: by row and token, its log-probability and the advantage."""
    found: dict[int, dict[int, tuple[float, float]]] = {}
    for kept in summary.read(folder, step):
        for at in np.flatnonzero(kept.group == group_id).tolist():
            figures = round(float(kept.logprob[at]), 4), round(float(kept.advantage[at]), 4)
            found.setdefault(int(kept.row[at]), {})[int(kept.position[at])] = figures
    return found


def _reference(reader: LedgerReader, row: GroupRow, payload: GroupPayload) -> Sequence[np.ndarray] | None:
    """Return the reference's log-probabilities, float32 [R] of each row."""
    if "reference" not in row.handles:
        return None
    flat = types.decode(Logprobs, reader.read(row.handles["reference"])).values
    return np.split(flat, np.cumsum(payload.lengths)[:-1])
