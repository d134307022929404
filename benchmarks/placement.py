"""`sluice bench placement`: where the calls of conversations go, with twice as many conversations as the rollouts have slots.

    conversations ── a call, a tool, a call ... ──► gateways: a rule of placement ──► engines: slots, a queue, a cache of blocks

The engines are simulated in the manner of vLLM, and so is time: first come first served; a prefix cache of blocks by salt: the
least recently used leave first; and the youngest sequence is preempted if another lacks room for its next block. The rule
`expected cost` is the gateway's own (`runtime.gateway.placement`). Two gateways do not know each other's calls. One rollout
serves alone for the first half minute. It is lost after a third of the time, and comes back empty. Weights are swapped twice.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from statistics import fmean

from msgspec import Struct

from benchmarks.compared import Compared
from runtime.commands import PeerAddress
from runtime.gateway import placement
from runtime.gateway.placement import PlacedCall, RolloutCost
from runtime.telemetry.shown import LiteralTable
from runtime.types import RolloutLoad

CHUNK = 32  # tokens of a block of an engine's cache, and of a sequence in a step of the simulation
PREFILL = 1e-4  # seconds a token
STEP, EACH = 0.02, 0.0002  # seconds of a decode step, and more for each sequence
BUDGET = 8192  # tokens of prompts that begin in one step
GROUP = 8  # conversations that begin with one prompt
SHARED, BEGIN = 512, 1024  # tokens that a group shares, and of the first prompt
AWAY = 30.0  # seconds for which a rollout is lost
STICKY, LEAST, COST = "sticky by name", "least loaded", "expected cost"
RULES = (STICKY, LEAST, COST)
TURNS = 3.2, 0.8  # of a conversation: mean and deviation of the logarithm
TEXT = 96, 609  # tokens of a tool's answer: at least, below


class PlacementLoad(Struct, frozen=True):
    """`at_once`: conversations. `slots`, `room`: of a rollout, samples and tokens. `reply`: tokens, at least, below."""

    name: str
    at_once: int
    slots: int
    room: int
    reply: tuple[int, int] = (64, 321)


class PlacementSettings(Struct, frozen=True):
    """`swap`: seconds from a version to the next. `tool`: seconds of a tool on average."""

    loads: tuple[PlacementLoad, ...] = (
        PlacementLoad("2 x the slots", 128, 16, 480_000),
        PlacementLoad("2 x the slots, smaller caches", 128, 16, 320_000),
        PlacementLoad("2 x the memory, long replies", 128, 64, 200_000, (1024, 4097)),
    )
    rollouts: int = 4
    tool: float = 1.0
    seconds: float = 600.0
    swap: float = 200.0
    gateways: int = 2
    seeds: tuple[int, ...] = (0, 1, 2)


FULL = PlacementSettings()
QUICK = PlacementSettings(loads=FULL.loads[:1], seconds=300.0, swap=100.0, seeds=(0,))


class PlacementResult(Struct):
    """The figures of one rule and seed. `hits`: prompt tokens of earlier turns that the caches had, of those of endless caches.
    `idle`: the part of the rollouts' time in which one had no work while calls waited at another. `apart`: preemptions while
    another rollout had no work. `moves`: the part of the calls. `call`: seconds of a call on average."""

    load: str
    rule: str
    hits: float
    idle: float
    preemptions: int
    apart: int
    moves: float
    call: float
    tokens_per_second: float


class PlacementReport(Struct):
    results: list[PlacementResult]


class Conversation:
    def __init__(self, number: int):
        self.number, self.random = number, Random(number)
        self.turns = 1 + int(self.random.lognormvariate(*TURNS))
        self.length = BEGIN  # tokens
        self.at = ""  # the rollout that answered last
        self.version, self.known = -1, 0  # of its last reply, and how many tokens it ended with
        self.asked = 0.0

    def key(self, end: int) -> int:
        """Return the key of its beginning of so many tokens."""
        return hash((self.number // GROUP if end <= SHARED else (self.number,), end))

    def some(self, least: int, most: int) -> int:
        return self.random.randrange(least, most, CHUNK)


class SimulatedCall(Struct):
    """`cached`, `ideal`: tokens of the prompt that were found, and that an endless cache would have; `salt`: the version."""

    of: Conversation
    call: PlacedCall
    reply: int
    made: int = 0
    salt: int = -1
    cached: int = 0
    ideal: int = 0
    seconds: float = 0.0  # of its prefill
    blocks: list[int] = []


class SimulatedEngine:
    """`used`: blocks of running sequences, with their number; `free`: other blocks, the least recently used first."""

    def __init__(self, address: PeerAddress, blocks: int, version: int):
        self.address, self.blocks, self.version = address, blocks, version
        self.waiting, self.running = deque[SimulatedCall](), list[SimulatedCall]()
        self.used, self.free = Counter[int](), OrderedDict[int, None]()
        self.preemptions = 0
        self.steps = False  # whether a step is under way

    @property
    def work(self) -> int:
        return len(self.waiting) + len(self.running)

    def _take(self, key: int) -> bool:
        """Use a block; False without room."""
        if key not in self.used and key not in self.free and len(self.used) + len(self.free) >= self.blocks:
            if not self.free:
                return False
            self.free.popitem(last=False)
        self.free.pop(key, None)
        self.used[key] += 1
        return True

    def drop(self, each: SimulatedCall) -> None:
        for key in reversed(each.blocks):
            self.used[key] -= 1
            if not self.used[key]:
                del self.used[key]
                self.free[key] = None
        each.blocks = []

    def _begin(self) -> bool:
        """Start the first that waits; False without room."""
        each = self.waiting[0]
        salt, found = (each.salt if each.made else self.version), 0
        for end in range(CHUNK, each.call.prompt + each.made + 1, CHUNK):
            key = hash((salt, each.of.key(end)))
            found += CHUNK * (found == end - CHUNK and (key in self.used or key in self.free))
            if not self._take(key):
                self.drop(each)
                return False
            each.blocks.append(key)
        if each.salt < 0:
            each.ideal = each.of.known if each.of.version == salt else 0
        each.salt, each.cached = salt, min(found, each.call.prompt - 1)
        self.running.append(self.waiting.popleft())
        return True

    def step(self) -> tuple[float, list[SimulatedCall]]:
        """Return the seconds of a step, and the calls that it finishes."""
        before, begun = len(self.running), 0
        while self.waiting and len(self.running) < self.address.slots and begun < BUDGET and self._begin():
            begun += self.running[-1].call.prompt + self.running[-1].made - self.running[-1].cached
        for each in self.running[before:]:
            each.seconds = begun * PREFILL + STEP
        seconds = begun * PREFILL + CHUNK * (STEP + EACH * len(self.running))
        queue, kept, done = deque(self.running), list[SimulatedCall](), list[SimulatedCall]()
        while queue:
            each = queue.popleft()
            key = hash((each.salt, each.of.key(each.call.prompt + each.made + CHUNK)))
            while not self._take(key):
                last = queue.pop() if queue else each
                self.drop(last)
                self.waiting.appendleft(last)
                self.preemptions += 1
                if last is each:
                    break
            else:
                each.blocks.append(key)
                each.made += CHUNK
                (done if each.made >= each.reply else kept).append(each)
        self.running = kept
        for each in done:
            self.drop(each)
        return seconds, done


class PlacementTrial:
    """One rule, in simulated time."""

    def __init__(self, settings: PlacementSettings, load: PlacementLoad, rule: str, seed: int):
        self._settings, self._load, self._rule = settings, load, rule
        self._now, self._events = 0.0, list[tuple[float, int, Callable[[], None]]]()
        self._order, self._numbers = count(), count(seed * 100_000)
        self._version = 0
        self._engines: dict[str, SimulatedEngine] = {}
        self._costs: list[dict[PeerAddress, RolloutCost]] = [{} for _ in range(settings.gateways)]
        self._calls = [Counter[str]() for _ in range(settings.gateways)]  # under way, as of today's rule
        self._seen = [0] * settings.gateways  # versions
        self.cached = self.ideal = self.tokens = self.moves = self.preemptions = self.apart = 0
        self.took, self.idle, self.lengths = list[float](), 0.0, list[int]()

    def run(self) -> None:
        settings = self._settings
        for number in range(settings.rollouts):
            name = f"rollout-{number}"
            self._at(AWAY * (number > 0), partial(self._start, name))
        for index in range(self._load.at_once):
            self._at(0.01 * (index + 1), self._converse)
        self._at(settings.seconds / 3, self._lose)
        for number in range(1, int(settings.seconds / settings.swap) + 1):
            self._at(number * settings.swap, self._swap)
        while self._events and self._now < settings.seconds:
            before = self._now
            self._now, _, event = heapq.heappop(self._events)
            if any(each.waiting for each in self._engines.values()):
                self.idle += (self._now - before) * sum(not each.work for each in self._engines.values())
            event()

    def _at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), event))

    def _start(self, name: str) -> None:
        address = PeerAddress(name, next(self._order), "", "", self._load.slots)
        self._engines[name] = SimulatedEngine(address, self._load.room // CHUNK, self._version)
        for costs in self._costs:
            costs[address] = RolloutCost(address.slots)

    def _lose(self) -> None:
        """Lose a rollout. Its calls go elsewhere, and it comes back empty."""
        engine = self._engines.pop("rollout-0")
        for costs in self._costs:
            del costs[engine.address]
        for each in (*engine.running, *engine.waiting):
            self._leave(each, engine)
            self._send(each.of, each.reply)
        self._at(self._now + AWAY, lambda: self._start("rollout-0"))

    def _swap(self) -> None:
        self._version += 1
        for engine in self._engines.values():
            engine.version = self._version

    def _converse(self) -> None:
        self._ask(Conversation(next(self._numbers)))

    def _ask(self, of: Conversation) -> None:
        of.asked = self._now
        self._send(of, of.some(*self._load.reply))

    def _gateway(self, of: Conversation) -> int:
        return of.number // GROUP % self._settings.gateways

    def _send(self, of: Conversation, reply: int) -> None:
        gateway = self._gateway(of)
        keys = [of.key(end) for end in range(placement.BLOCK, of.length + 1, placement.BLOCK)]
        each, costs = SimulatedCall(of, PlacedCall(of.length, 1, keys), reply), self._costs[gateway]
        engine = self._engines[self._choose(each.call, of.at, gateway)]
        self._calls[gateway][engine.address.name] += 1
        costs[engine.address].begin(each.call, self._now)
        self.moves += bool(of.at) and of.at != engine.address.name
        engine.waiting.append(each)
        if not engine.steps:
            self._step(engine)

    def _choose(self, call: PlacedCall, at: str, gateway: int) -> str:
        if self._rule == COST:
            return placement.cheapest(self._costs[gateway], call, self._now, at).name
        if self._rule == STICKY and at in self._engines:
            return at
        return min(self._engines, key=lambda name: (self._calls[gateway][name], name))

    def _step(self, engine: SimulatedEngine) -> None:
        engine.steps = bool(engine.work)
        if engine.steps:
            before = engine.preemptions
            seconds, done = engine.step()
            idle = any(not each.work for each in self._engines.values())
            self.preemptions += engine.preemptions - before
            self.apart += (engine.preemptions - before) * idle
            self._at(self._now + seconds, lambda: self._stepped(engine, done))

    def _stepped(self, engine: SimulatedEngine, done: list[SimulatedCall]) -> None:
        if self._engines.get(engine.address.name) is engine:
            for each in done:
                self._finish(each, engine)
            self._step(engine)
        else:  # lost meanwhile
            for each in done:
                self._leave(each, engine)
                self._send(each.of, each.reply)

    def _leave(self, each: SimulatedCall, engine: SimulatedEngine) -> None:
        self._calls[self._gateway(each.of)][engine.address.name] -= 1

    def _finish(self, each: SimulatedCall, engine: SimulatedEngine) -> None:
        """Choose as `RolloutSessions` does."""
        self._leave(each, engine)
        of, gateway = each.of, self._gateway(each.of)
        costs, cost = self._costs[gateway], self._costs[gateway][engine.address]
        cost.end(each.call)
        if engine.version > self._seen[gateway]:
            self._seen[gateway] = engine.version
            for other in costs.values():
                other.texts.clear()
        used = len(engine.used) / engine.blocks
        room = engine.blocks * CHUNK
        load = RolloutLoad(cached=each.cached, prefill_seconds=each.seconds, samples=engine.work, room=room, used=used)
        cost.observe(each.call, load, self._now)
        for other in costs.values():
            other.guess(cost)
        self.cached += min(each.cached, each.ideal)
        self.ideal += each.ideal
        self.tokens += each.reply
        self.took.append(self._now - of.asked)
        self.lengths.append(of.length)
        of.length += each.made
        of.at, of.version, of.known = engine.address.name, each.salt, of.length
        if each.salt == self._seen[gateway]:
            cost.keep([of.key(end) for end in range(placement.BLOCK, of.length + 1, placement.BLOCK)])
        of.turns -= 1
        of.length += of.some(*TEXT)
        seconds = of.random.expovariate(1 / self._settings.tool)
        self._at(self._now + seconds, (lambda: self._ask(of)) if of.turns else self._converse)


async def measure(
    folder: Path, settings: PlacementSettings, show: Callable[[str], None] = lambda line: None
) -> PlacementReport:
    report = PlacementReport([])
    for load in settings.loads:
        for rule in RULES:
            for seed in settings.seeds:
                show(f"{load.name}, {rule}, seed {seed}")
                report.results.append(_result(settings, load, rule, seed))
    return report


def _result(settings: PlacementSettings, load: PlacementLoad, rule: str, seed: int) -> PlacementResult:
    trial = PlacementTrial(settings, load, rule, seed)
    trial.run()
    return PlacementResult(
        load=load.name,
        rule=rule,
        hits=trial.cached / trial.ideal,
        idle=trial.idle / settings.seconds / settings.rollouts,
        preemptions=trial.preemptions,
        apart=trial.apart,
        moves=trial.moves / len(trial.took),
        call=fmean(trial.took),
        tokens_per_second=trial.tokens / settings.seconds,
    )


def compared(report: PlacementReport) -> list[Compared]:
    hits = [each.hits for each in report.results if each.rule == COST and each.load == report.results[0].load]
    return [Compared(f"prefix-cache hits of {COST} / of endless caches", hits, "≥ 0.9")]


def render(report: PlacementReport) -> list[LiteralTable]:
    names = ("conversations", "rule", "hits / ideal", "idle", "preemptions", "apart", "moves", "call, s", "tokens/s")
    table = LiteralTable(*names, title="placement of calls, means over seeds", title_justify="left")
    for load, rule in dict.fromkeys((each.load, each.rule) for each in report.results):
        same = [each for each in report.results if (each.load, each.rule) == (load, rule)]
        means = {name: fmean(getattr(each, name) for each in same) for name in PlacementResult.__struct_fields__[2:]}
        shares = (f"{means['hits']:.3f}", f"{means['idle']:.2%}", f"{means['preemptions']:,.0f}", f"{means['apart']:,.0f}")
        rates = (f"{means['moves']:.1%}", f"{means['call']:.2f}", f"{means['tokens_per_second']:,.0f}")
        table.add_row(load, rule, *shares, *rates)
    table.caption = "idle: of the rollouts' time, without work while calls waited elsewhere; apart: preemptions meanwhile"
    return [table]
