"""Place each call of the policy where it costs least: prefill of what a rollout's cache lacks, and the queue there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np
from msgspec import Struct

from runtime.commands import PeerAddress
from runtime.types import RolloutLoad

BLOCK = 64  # tokens; beginnings are compared in whole blocks
CROWDING = 0.125  # of a reply's time, by which full slots slow it down: spreads conversations that begin alike
NEWEST = 0.1  # the weight of the newest measurement in a mean


def beginnings(tokens: np.ndarray) -> list[int]:
    """Return the hash of each beginning of whole blocks, the shortest first."""
    blocks = tokens[: len(tokens) // BLOCK * BLOCK].astype("<i4").reshape(-1, BLOCK)
    return list(accumulate(map(np.ndarray.tobytes, blocks), lambda key, block: hash((key, block)), initial=0))[1:]


class PlacedCall(Struct):
    """A call to place. `load`, `held`, `began`: load and held of its rollout when it was sent, and when, in seconds."""

    prompt: int  # tokens
    n: int  # replies
    keys: list[int]  # `beginnings` of the prompt
    load: float = 1.0
    held: int = 0
    began: float = 0.0


class RolloutCost:
    """The seconds by which a call at one rollout delays this call and those that are there:

        (prompt - trust * held) * pace * (1 + samples) + service * (max(0, load - 1) + CROWDING * load)

    - held: tokens of the prompt's longest beginning among `texts`, the blocks that this rollout returned under the present
      version; the least recently used leave at its cache's room. trust: the part of held that the engine really found, a mean.
    - pace: seconds a token of the prefills that the engine measured, least squares through 0. service: seconds of a reply
      after its prefill, divided by the load above 1 that it met, a mean.
    - load: samples / slots, this call included; or tokens / room if that is more and running samples share the cache's room.
    - samples, tokens: of own calls under way, and of others: what the rollout last reported, less the own calls of that moment.
      Half of the others are taken for done after `service`, times their samples / slots if more."""

    def __init__(self, slots: int):
        self.texts = OrderedDict[int, None]()  # `beginnings`, the least recently used first
        self._own = self._others = np.zeros(2)  # samples, tokens
        self._slots, self._report, self._reported = slots, RolloutLoad(cached=0, prefill_seconds=0.0), 0.0
        self._trust = self._service = self._halved = 1.0
        self._prefill = np.array([1e-4, 1.0])  # sums of tokens * seconds, and of tokens squared; a guess until measured

    def seconds(self, call: PlacedCall, now: float) -> float:
        (samples, load), (products, squares) = self._load(call, now), self._prefill
        prefill = (call.prompt - self._trust * self._found(call)) * products / squares
        return float(prefill * (1 + samples) + self._service * (max(0.0, load - 1) + CROWDING * load))

    def _found(self, call: PlacedCall) -> int:
        return BLOCK * next((at for at, key in enumerate(call.keys) if key not in self.texts), len(call.keys))

    def _load(self, call: PlacedCall, now: float) -> tuple[float, float]:
        samples, tokens = self._own + self._others * 0.5 ** ((now - self._reported) / self._halved)
        memory = (tokens + call.n * call.prompt) / self._report.room if self._report.used else 0.0
        return samples, max((samples + call.n) / self._slots, memory)

    def begin(self, call: PlacedCall, now: float) -> None:
        call.load, call.held, call.began = self._load(call, now)[1], self._found(call), now
        self._own = self._own + np.array([call.n, call.n * call.prompt])

    def end(self, call: PlacedCall) -> None:
        self._own = self._own - np.array([call.n, call.n * call.prompt])

    def observe(self, call: PlacedCall, report: RolloutLoad, now: float) -> None:
        """Learn from the reply to a call that has ended."""
        if report.prefill_seconds:
            older, computed = (1 - NEWEST) * (self._reported > 0), max(1, call.prompt - report.cached)
            self._prefill = older * self._prefill + np.array([computed * report.prefill_seconds, computed**2])
        if call.held:
            self._trust += NEWEST * (min(1.0, report.cached / call.held) - self._trust)
        took = max(1e-3, now - call.began - report.prefill_seconds) / max(1.0, call.load)
        self._service += (NEWEST if self._reported else 1.0) * (took - self._service)
        self._others = np.maximum(0.0, (report.samples, report.used * report.room) - self._own)
        self._report, self._reported, self._halved = report, now, self._service * max(1.0, self._others[0] / self._slots)

    def guess(self, other: RolloutCost) -> None:
        """Use what another rollout measured until this rollout's first reply."""
        if not self._reported:
            self._service, self._prefill = other._service, other._prefill

    def keep(self, keys: Sequence[int]) -> None:
        """Note that the cache holds a text, by its `beginnings`. The end of a text leaves the cache before its beginning."""
        for key in reversed(keys):
            self.texts[key] = None
            self.texts.move_to_end(key)
        while len(self.texts) * BLOCK > self._report.room:
            self.texts.popitem(last=False)


def cheapest(costs: Mapping[PeerAddress, RolloutCost], call: PlacedCall, now: float, kept: str) -> PeerAddress:
    """Return the rollout where the call costs least; of equal rollouts the one named `kept`, which the conversation had."""
    return min(costs, key=lambda each: (costs[each].seconds(call, now), each.name != kept, each.name))
