"""The experts that tokens took in the rollout, as a rank of the trainer or reference needs them: of its own tokens and layers.

L layers with experts, this rank computes l of them. A token takes k experts in each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from runtime.blobs import BlobPart, agents
from runtime.errors import InvalidMessage
from runtime.models.forward import spans, starts
from runtime.types import GroupPayload, RoutedExperts

_NONE = np.zeros(0, np.int64)


class GroupRoutes:
    """The experts of the tokens of some groups: in their payloads, or read from the agents that hold them. What was read once
    is kept: several passes need the same."""

    def __init__(self, payloads: Sequence[GroupPayload], count: int):
        """Prepare for groups whose experts fit the model, each layer with `count` experts."""
        self._taken = [payload.experts for payload in payloads if payload.experts is not None]
        self._count = count
        begins, prompts, replies, number = list[int](), [_NONE], [_NONE], 0
        for payload in payloads:
            begins.append(number)
            lengths = payload.lengths.astype(np.int64)
            given, fed = len(payload.prompt), np.maximum(lengths - 1, 0)
            prompts.append(np.arange(number, number + given))
            own = np.full(len(payload.tokens), -1)  # a reply's last token is not fed, and took none
            own[spans(starts(lengths), fed)] = np.arange(number + given, number + given + int(fed.sum()))
            replies.append(own)
            number += given + int(fed.sum())
        self._begin = np.array(begins, np.int64)  # of each group, in the rows of all groups
        self._rows = np.concatenate([*prompts, *replies])  # the row of each token: of all prompts, then of all replies
        self._parts: dict[tuple[int, int], _KnownPart] = {}

    def at(self, places: np.ndarray, layers: slice) -> np.ndarray:
        """Return the experts of the tokens at `places`, int64 [t], in `layers`: uint8 or uint16 [t, l, k]. A place counts over
        all prompts, then over all replies; 0 at place -1. Raises BlobLost, and InvalidMessage for unknown experts."""
        first, *_ = self._taken
        begin, end, _ = layers.indices(first.layers)
        out = np.zeros((len(places), end - begin, first.per_token), np.result_type(*(each.data for each in self._taken)))
        rows = np.where(places < 0, -1, self._rows[places])
        known = np.flatnonzero(rows >= 0)
        groups = np.searchsorted(self._begin, rows[known], "right") - 1
        asked = {}
        for group in np.unique(groups).tolist():
            where = known[groups == group]
            if (part := self._parts.get((group, begin))) is None:
                part = self._parts[group, begin] = _KnownPart(self._taken[group], begin, end)
            asked[group] = part, where, rows[where] - self._begin[group]
        self._read([(part, part.missing(own)) for part, _, own in asked.values()])
        for part, where, own in asked.values():
            out[where] = part.data[own]
        return out

    def _read(self, wanted: Sequence[tuple[_KnownPart, np.ndarray]]) -> None:
        """Read rows that are not here yet, of all groups at once."""
        asked = [(part, rows) for part, rows in wanted if len(rows)]
        for (part, rows), data in zip(asked, agents.read([part.asked(rows) for part, rows in asked]), strict=True):
            part.data[rows] = data.view(part.data.dtype).reshape(len(rows), *part.data.shape[1:])
            part.here[rows] = True
            if int(part.data[rows].max(initial=0)) >= self._count:
                raise InvalidMessage(f"blob {part.taken.blob}: an expert beyond the {self._count} of a layer")


class _KnownPart:
    """The known part of one group's experts, in the layers `begin` to `end`."""

    def __init__(self, taken: RoutedExperts, begin: int, end: int):
        self.taken, blob = taken, taken.blob
        width = taken.per_token * taken.data.itemsize
        self._columns = begin * width, end * width
        if blob is None:
            self.data, self.here = taken.rows[:, begin:end], np.ones(len(taken.rows), bool)
        else:
            self.data = np.zeros((blob.rows, end - begin, taken.per_token), taken.data.dtype)
            self.here = np.zeros(blob.rows, bool)

    def missing(self, rows: np.ndarray) -> np.ndarray:
        """Return which of `rows` must be read, ascending."""
        return np.unique(rows[~self.here[rows]])

    def asked(self, rows: np.ndarray) -> BlobPart:
        assert self.taken.blob is not None
        return BlobPart(self.taken.blob, *self._columns, rows)
