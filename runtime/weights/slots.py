"""Which buckets of a transfer may share a buffer, where memory does not hold the whole of it. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate

from runtime.weights.plan import Bucket


def plan_slots(buckets: Sequence[Bucket], bucket_bytes: int, spare: int, root: int = 0) -> tuple[int, ...]:
    """The slot, a buffer, that each of the buckets of sender `root` uses; slots are numbered from 0.

    `buckets` are all that this sender holds, also those that another sends. Their tensors are gathered in the manifest's
    order, by all holders in step, and they leave in their own, each once it is whole. A bucket follows another in its slot
    only if that one is due to leave before the first tensor of this one is gathered: so whoever gathers may wait for it.
    Buckets of up to `bucket_bytes` of data have at least `spare` slots, as far as there are so many buckets; the larger ones,
    of a single tensor each, share slots of their own.
    """
    whole = list(accumulate((max(entry.tensor for entry in bucket.entries) for bucket in buckets), max))
    pools: dict[bool, deque[tuple[int, int]]] = {False: deque(), True: deque()}  # slots, and the last bucket of each
    slots: list[int] = []
    for index, bucket in enumerate(buckets):
        if bucket.root != root:
            continue
        large = bucket.data_bytes > bucket_bytes
        pool = pools[large]
        slot = max(slots, default=-1) + 1
        if len(pool) >= (1 if large else spare) and whole[pool[0][1]] < min(entry.tensor for entry in bucket.entries):
            slot, _ = pool.popleft()
        pool.append((slot, index))
        slots.append(slot)
    return tuple(slots)


def predecessors(slots: Sequence[int]) -> tuple[int | None, ...]:
    """The bucket that each follows in its slot, None for the first."""
    newest: dict[int, int] = {}
    found: list[int | None] = []
    for index, slot in enumerate(slots):
        found.append(newest.get(slot))
        newest[slot] = index
    return tuple(found)
