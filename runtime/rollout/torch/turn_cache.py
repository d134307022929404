"""A prefix cache: keys and values of conversations that wait for their next turn, found again by their tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict

import numpy as np
import torch

from runtime.columns import common

SHORTEST = 16  # tokens: a shorter beginning is computed with the rest, as most prompts of a run share so much by their template


class TurnCache:
    """At most `capacity` bytes of keys and values; texts that were not used for the longest time leave first.

    What is common to a prompt and a text that was put in is found, as keys and values depend on nothing behind them. So a text
    that another one begins with need not be there a second time: a conversation is held once, in its latest state.

    The texts are sorted: whatever begins as a prompt does is next to the place where the prompt itself would be.
    """

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._held: OrderedDict[bytes, torch.Tensor] = OrderedDict()  # by `_key`, the least recently used first
        self._sorted: list[bytes] = []
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._sorted)

    def put(self, text: np.ndarray, keys_values: torch.Tensor) -> None:
        """Copy those of `text` [length]: [layers, parts, heads, length, width]. Not when they alone are above `capacity`."""
        if keys_values.nbytes > self._capacity:
            return
        key = _key(text)
        place = bisect_left(self._sorted, key)
        if place < len(self) and self._sorted[place].startswith(key):
            self._held.move_to_end(self._sorted[place])
            return
        while place and key.startswith(self._sorted[place - 1]):
            place -= 1
            self._drop(self._sorted[place])
        while self.bytes + keys_values.nbytes > self._capacity:
            self._drop(next(iter(self._held)))
        self._sorted.insert(bisect_left(self._sorted, key), key)
        self._held[key] = keys_values.clone(memory_format=torch.contiguous_format)
        self.bytes += keys_values.nbytes

    def longest(self, prompt: np.ndarray, most: int = -1) -> torch.Tensor | None:
        """Those of the longest beginning of `prompt` [P] that is there, of `most` tokens at most unless that is negative:
        [layers, parts, heads, length, width]. Its last token is always left to be computed. None: nothing is there of
        `SHORTEST` tokens or more."""
        if not self._sorted:
            return None
        key = _key(prompt)
        place = bisect_left(self._sorted, key)
        beside = self._sorted[max(0, place - 1) : place + 1]
        length, best = max((common(prompt, np.frombuffer(each, "<i4")), each) for each in beside)
        length = min(length, len(prompt) - 1, most if most >= 0 else length)
        if length < SHORTEST:
            return None
        self._held.move_to_end(best)
        return self._held[best][:, :, :, :length]

    def clear(self) -> None:
        self._held.clear()
        self._sorted.clear()
        self.bytes = 0

    def _drop(self, key: bytes) -> None:
        del self._sorted[bisect_left(self._sorted, key)]
        self.bytes -= self._held.pop(key).nbytes


def _key(tokens: np.ndarray) -> bytes:
    return tokens.astype("<i4").tobytes()
