"""Continuous batching in a simulation: slots, a queue, and decode steps whose duration grows with the number of sequences.

Between two events all sequences advance alike, by a token in `decode_step + B · decode_sequence` seconds. So the engine keeps
one token count for all sequences: one that begins at count c ends at c plus its length. One timer waits for the next end."""

from __future__ import annotations

import asyncio
import heapq
import math
import random
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from itertools import chain, count

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from runtime.config import Config
from runtime.errors import BlobLost
from runtime.types import Holder, PolicyVersion, Sample, StepResult
from runtime.weights.plan import hops

# ---- Costs
# The costs in a simulation: lengths in tokens, durations in seconds. Pure: the caller passes the random generator.


class ReplyLengths(Struct, frozen=True):
    """Measured lengths of replies in tokens, by group: replies to one prompt have similar lengths."""

    groups: Sequence[Sequence[int]]

    def draw_group(self, chance: random.Random, size: int) -> list[float]:
        group = self.groups[chance.randrange(len(self.groups))]
        return [float(chance.choice(group)) for _ in range(size)]


class Fixed(Struct, frozen=True):
    value: float

    def draw(self, chance: random.Random) -> float:
        return self.value


class LogNormal(Struct, frozen=True):
    median: float
    sigma: float  # of the logarithm

    def draw(self, chance: random.Random) -> float:
        return self.median * math.exp(self.sigma * chance.gauss(0.0, 1.0))


class Pareto(Struct, frozen=True):
    """P(x > v) = (least / v)^shape, cut at `most`."""

    least: float
    shape: float
    most: float = math.inf

    def draw(self, chance: random.Random) -> float:
        return min(self.most, self.least * chance.paretovariate(self.shape))


Distribution = Fixed | LogNormal | Pareto


class Costs(Struct, frozen=True, kw_only=True):
    """The costs of one run, in seconds unless noted. A decode step of B sequences takes `decode_step + B · decode_sequence`."""

    prompt_tokens: int = 16
    reply_tokens: Distribution | ReplyLengths = LogNormal(8.0, 0.5)  # cut at sampling.max_new_tokens
    length_scale: float = 1.0  # factor on all reply lengths
    decode_step: float = 1e-3
    decode_sequence: float = 5e-5
    prefill_token: float = 1e-5
    score: Distribution = Fixed(2e-3)  # of a group, by one of `rewards.workers`
    reference_token: float = 1e-5
    train_token: float = 5e-5
    update: float = 2e-3  # of the optimizer, for any batch
    weights_bytes: float = 4e6
    bandwidth: float = 1e9  # bytes a second over the network, into and out of each process
    memory: float = 1e9  # bytes a second that a process copies out of another's memory
    swap: float = 1e-3  # of a rollout to a received version
    save: float = 1e-2
    keep: float = 1e-3  # of a model's state into host memory, or back
    start: Distribution = Fixed(2.0)  # of a process, until it registers
    forked: float = 0.4  # share of `start` that a model's ranks take which are forked from a warm process
    delay: Distribution = Fixed(2e-4)  # of a message, one way
    storage: Distribution = Fixed(5e-4)  # of a write or read by the coordinator
    coordinator_message: float = 0.0  # of the coordinator's one thread, for each answer
    coordinator_byte: float = 0.0  # of that thread, for all work on a byte of a finished group
    cores: int = 0  # of a node, shared by all its processes; 0: each process has its own

    def lengths(self, chance: random.Random, size: int, limit: int) -> list[int]:
        """Draw the lengths of one group's replies, int in 1 … `limit`."""
        drawn = (
            self.reply_tokens.draw_group(chance, size)
            if isinstance(self.reply_tokens, ReplyLengths)
            else [self.reply_tokens.draw(chance) for _ in range(size)]
        )
        return [max(1, min(limit, round(length * self.length_scale))) for length in drawn]


def sync_seconds(costs: Costs, machines: Sequence[str], senders: int, bucket_bytes: int, workers: int = 1) -> list[float]:
    """Return the seconds in which each rollout's first worker gets its share of a version; the others take as long.
    `machines`: as for `hops`. A hop takes as long as its busiest receiver, all its hops of that kind together; no member sends
    more than one gets. Each further hop adds a bucket."""
    part = costs.weights_bytes / senders / workers
    ways = [hops(machines, senders, sender, workers) for sender in range(senders)]
    rates = {"collective": costs.bandwidth, "shared_memory": costs.memory}
    busy: defaultdict[tuple[str, int], float] = defaultdict(float)  # seconds
    for hop in chain.from_iterable(ways):
        for child in hop.children:
            busy[hop.transport, child] += part / rates[hop.transport]
    found: defaultdict[int, float] = defaultdict(float)  # by rank
    for way in ways:
        at: dict[int, tuple[float, float]] = {}  # by rank: seconds of the slowest hop on the way, and of buckets passed on
        for hop in way:
            slowest, passing = at.get(hop.parent, (0.0, 0.0))
            if hop.parent in at:
                passing += min(bucket_bytes, part) / rates[hop.transport]
            here = max(slowest, *(busy[hop.transport, child] for child in hop.children)), passing
            for child in hop.children:
                at[child], found[child] = here, max(found[child], sum(here))
    return [found[senders + rollout * workers] for rollout in range(len(machines) - senders)]


# ---- Cores
# The processors of a node in a simulation. Concurrent computations get equal shares, as from a fair scheduler.


class Cores:
    """`number` processors; 0: unlimited."""

    def __init__(self, loop: asyncio.AbstractEventLoop, number: int):
        self._loop, self._number = loop, number
        self._pieces: list[tuple[float, int, asyncio.Future[None]]] = []  # each with the value of `_done` at its end
        self._steady: dict[SimulatedEngine, None] = {}
        self._done = 0.0  # seconds computed so far by a piece that began with these processors
        self._since = loop.time()
        self._order = count()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def speed(self) -> float:
        """The speed of each computation; 1 on a processor of its own."""
        active = len(self._pieces) + len(self._steady)
        return min(1.0, self._number / active) if self._number and active else 1.0

    async def spend(self, seconds: float) -> None:
        """Return after `seconds` on a processor of its own, or later if the processors are shared."""
        if not self._number:
            await asyncio.sleep(seconds)
            return
        piece = self._loop.create_future()
        self._settle()
        heapq.heappush(self._pieces, (self._done + seconds, next(self._order), piece))
        self._rearm()
        try:
            await piece
        finally:
            if any(one[2] is piece for one in self._pieces):  # cancelled
                self._settle()
                self._pieces = [one for one in self._pieces if one[2] is not piece]
                heapq.heapify(self._pieces)
                self._rearm()

    def join(self, computing: SimulatedEngine) -> None:
        """Add a computation until `leave`. Both methods are idempotent."""
        if self._number and computing not in self._steady:
            self._settle()
            self._steady[computing] = None
            self._rearm()

    def leave(self, computing: SimulatedEngine) -> None:
        if computing in self._steady:
            self._settle()
            del self._steady[computing]
            self._rearm()

    def _settle(self) -> None:
        now = self._loop.time()
        self._done += (now - self._since) * self.speed
        self._since = now
        for computing in self._steady:
            computing.settle()

    def _rearm(self) -> None:
        for computing in self._steady:
            computing.rearm()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._pieces:
            seconds = max(0.0, self._pieces[0][0] - self._done) / self.speed
            self._timer = self._loop.call_at(self._since + seconds, self._end)

    def _end(self) -> None:
        self._settle()
        limit = self._pieces[0][0] + 1e-12
        self._done = max(self._done, self._pieces[0][0])
        while self._pieces and self._pieces[0][0] <= limit:
            piece = heapq.heappop(self._pieces)[2]
            if not piece.done():
                piece.set_result(None)
        self._rearm()


class SimulatedEngine:
    """A simulated engine. `pause` and `go_on` are counted: the engine decodes while the count is 0."""

    def __init__(self, loop: asyncio.AbstractEventLoop, costs: Costs, slots: int, cores: Cores):
        self.busy = 0.0  # seconds
        self._tokens = self._steps = 0.0  # decoded so far
        self._slots = self._all_slots = slots
        self._loop, self._costs, self._cores = loop, costs, cores
        self._queue: deque[tuple[object, int, int, Callable[[], None], Callable[[], None]]] = deque()
        self._running: list[tuple[float, int, object, Callable[[], None], int]] = []  # the last: tokens of the whole text
        self._count = 0.0  # tokens so far of a sequence that began with the engine
        self._since = loop.time()
        self._prefill = 0.0  # seconds of prefill before the next token
        self._pauses = 0
        self._timer: asyncio.TimerHandle | None = None
        self._numbers = count()
        self._idle = asyncio.Event()  # set when the last sequence ends

    def gauges(self) -> dict[str, float]:
        found = {"busy_seconds_total": self.busy, "decode_steps_total": self._steps, "tokens_total": self._tokens}
        return found | {"slots": self._all_slots, "running": len(self._running), "waiting": len(self._queue)}

    def submit(self, owner: object, prompt: int, tokens: int, begun: Callable[[], None], done: Callable[[], None]) -> None:
        """Queue a sequence. Calls `begun` when the sequence gets a slot, and `done` at its last token."""
        self._queue.append((owner, prompt, tokens, begun, done))
        self._update()

    def withdraw(self, owner: object) -> None:
        """Remove all sequences of `owner`, without a callback."""
        self.settle()
        self._queue = deque(one for one in self._queue if one[0] is not owner)
        self._running = [one for one in self._running if one[2] is not owner]
        heapq.heapify(self._running)
        self._update()

    def pause(self) -> None:
        self.settle()
        self._pauses += 1
        self._update()

    def go_on(self) -> None:
        self.settle()
        self._pauses -= 1
        self._update()

    def wake(self) -> None:
        """Go on after a sleep, which freed keys and values: compute the texts of running sequences again."""
        texts = sum(whole - (end - self._count) for end, *_, whole in self._running)
        self._prefill += texts * self._costs.prefill_token
        self.go_on()

    async def drained(self) -> None:
        """Wait until no sequence runs. Starts no queued sequence meanwhile."""
        self._slots = 0
        try:
            while self._running:
                self._idle.clear()
                await self._idle.wait()
        finally:
            self._slots = self._all_slots
            self._update()

    def _step(self) -> float:
        return self._costs.decode_step + self._costs.decode_sequence * len(self._running)

    def settle(self) -> None:
        """Account for the time since the last event."""
        now = self._loop.time()
        elapsed, self._since = now - self._since, now
        if self._pauses or not self._running:
            return
        self.busy += elapsed
        computed = elapsed * self._cores.speed
        prefill = min(computed, self._prefill)
        self._prefill -= prefill
        steps = (computed - prefill) / self._step()
        self._count += steps
        self._steps += steps
        self._tokens += steps * len(self._running)

    def _update(self) -> None:
        """Begin the queued sequences that get a slot, and wait for the nearest end."""
        self.settle()
        while self._queue and len(self._running) < self._slots and not self._pauses:
            owner, prompt, tokens, begun, done = self._queue.popleft()
            self._prefill += prompt * self._costs.prefill_token
            heapq.heappush(self._running, (self._count + tokens, next(self._numbers), owner, done, prompt + tokens))
            begun()
        (self._cores.join if self._running and not self._pauses else self._cores.leave)(self)
        self.rearm()

    def rearm(self) -> None:
        """Set the timer for the nearest end, at the current speed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._running and not self._pauses:
            seconds = self._prefill + max(0.0, self._running[0][0] - self._count) * self._step()
            self._timer = self._loop.call_at(self._since + seconds / self._cores.speed, self._end)

    def _end(self) -> None:
        self.settle()
        ended = []
        limit = self._running[0][0] + 1e-9  # includes the timer's own sequence despite rounding
        self._count = max(self._count, self._running[0][0])
        while self._running and self._running[0][0] <= limit:
            ended.append(heapq.heappop(self._running)[3])
        for done in ended:
            done()
        if not self._running:
            self._idle.set()
        self._update()


STATE = "simulated.json"  # a model's file in a checkpoint


class Stamp(msgspec.Struct, frozen=True):
    """A group's payload: the group, the packed versions of its oldest and newest token, and its number of tokens."""

    group_id: int
    oldest: int
    newest: int
    tokens: int  # prompts included
    holders: list[Holder] = []  # of the experts that were chosen


class ModelState(msgspec.Struct):
    """The state that an update changes: the next step, and all trained groups in order."""

    step: int = 0
    trained: list[int] = []


class SimulatedAgents:
    """The nodes' agents as holders of blobs. A blob is held by its node and the next, until these are lost or no step can need
    it. Without `router_replay` there are no blobs."""

    def __init__(self, config: Config, nodes: int):
        self._bound, self._replays = config.training.staleness, config.moe.router_replay == "routing"
        self._agents = {f"node-{number}": Holder(f"node-{number}", "0") for number in range(nodes)}
        self.step = 0  # of the run
        self.losses = 0  # of nodes

    async def there(self) -> set[Holder]:
        return {*self._agents.values()}

    def holders(self, node: str) -> list[Holder]:
        """Return the holders of a blob that is put on `node` now."""
        names = [*self._agents]
        other = names[(names.index(node) + 1) % len(names)]
        return [self._agents[name] for name in dict.fromkeys((node, other))] if self._replays else []

    def lose(self, node: str) -> None:
        """Lose a node's blobs; another agent comes in the place of its agent."""
        self.losses += 1
        self._agents[node] = Holder(node, str(self.losses))

    def require(self, reader: str, *payloads: bytes) -> None:
        """Raise BlobLost if no agent holds a group's blob any more. A critic needs none."""
        for payload in payloads if self._replays and not reader.startswith("critic") else ():
            stamp = msgspec.msgpack.decode(payload, type=Stamp)
            due = (stamp.oldest & 0xFFFFFFFF) + self._bound
            if stamp.holders and (due < self.step or not any(each in self._agents.values() for each in stamp.holders)):
                raise BlobLost(reader, "read", f"no agent holds the blob of group {stamp.group_id} any more")


class HostMemory:
    """The copies of models' states, which outlive the processes, and are lost with a model's node."""

    def __init__(self) -> None:
        self.lost: set[str] = set()  # models whose copies were lost
        self._kept: dict[str, dict[PolicyVersion, tuple[ModelState, StepResult]]] = {}

    def keep(self, name: str, version: PolicyVersion, state: ModelState, result: StepResult) -> None:
        """Keep a copy, and of the older ones the newest."""
        older = list(self._kept.get(name, {}).items())[-1:]
        self._kept[name] = {**dict(older), version: (state, result)}

    def newest(self, name: str, least: PolicyVersion) -> tuple[PolicyVersion, ModelState, StepResult] | None:
        """Return the copy of the version after `least`, or that of `least`."""
        for version in (replace(least, step=least.step + 1), least):
            if (found := self._kept.get(name, {}).get(version)) is not None:
                return version, *found
        return None

    def lose(self, name: str) -> None:
        if self._kept.pop(name, None):
            self.lost.add(name)


def _samples(lengths: list[int], versions: list[PolicyVersion]) -> list[Sample]:
    return [
        Sample(
            tokens=np.ones(length, np.int32),
            loss_mask=np.ones(length, np.uint8),
            logprobs=np.full(length, -0.5, np.float32),
            versions=np.full(length, version.pack(), np.int64),
            finish_reason="stop",
        )
        for length, version in zip(lengths, versions, strict=True)
    ]
