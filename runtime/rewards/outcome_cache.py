"""The values of tasks that were evaluated before, the least recently used going first."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

DIGEST_BYTES = 16


def digest(task: bytes) -> bytes:
    """What stands for an encoded task. Cryptographic, as the text is whatever a model writes."""
    return hashlib.blake2b(task, digest_size=DIGEST_BYTES).digest()


class OutcomeCache:
    """Values by a task's digest, so that an entry takes about 200 bytes however long the reply is; at most `entries`.

    Only values are kept: what ran out of time once may have had a bad moment.
    """

    def __init__(self, entries: int):
        self._most = entries
        self._values: OrderedDict[bytes, bool | float] = OrderedDict()

    def get(self, key: bytes) -> bool | float | None:
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
        return value

    def put(self, key: bytes, value: bool | float) -> None:
        if self._most:
            self._values[key] = value
            self._values.move_to_end(key)
            if len(self._values) > self._most:
                self._values.popitem(last=False)

    def __len__(self) -> int:
        return len(self._values)
