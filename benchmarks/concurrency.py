"""`sluice bench concurrency`: tokens a second with as many episodes at once as the coordinator measures, beside fixed numbers.

    the bench: keeps so many groups under way ── Play ──► gateway ── Generate ──► rollout, embedded engine
        ▲                                                    ▲
        └── status of both, every half second                └── HTTP ── programs: a call, a tool, a call ...

Gateway and rollout are processes of their own, as in a run, and the bench feeds the rule as the coordinator would. All ways
take turns, round by round, and each begins with nothing under way.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from statistics import fmean

import msgspec
import uvloop
from msgspec import Struct
from msgspec.structs import replace

from benchmarks.compared import Compared
from benchmarks.concurrency_trial import ProgramSettings
from benchmarks.inputs import CONFIG
from benchmarks.process import end, service
from runtime import run_files, timeouts
from runtime.commands import PeerAddress, UpdateEndpoints
from runtime.config import Gateway, Network, Rollout, loading
from runtime.coordinator.gateways import Concurrency
from runtime.coordinator.metrics_recorder import Load, load_of
from runtime.errors import DeadlineExceeded, ServiceFault, SluiceError
from runtime.models.tiny_model import Shape
from runtime.status import Registration
from runtime.telemetry.shown import LiteralTable
from runtime.types import EpisodeTask, RunEpisodesRequest, SamplingParams
from services.rpc.client import Channel, Session
from services.rpc.server import Server
from sluice import start

HOST, KEY = "127.0.0.1", "of-the-programs"
START = 120.0  # seconds
DEADLINE = 1800.0  # of a group
SLOTS, GROUP = 16, 4
REPLY, CONTEXT = 128, 2048  # tokens
TURNS = 3, 7  # at least, at most
KEPT = 1 << 30  # bytes of keys and values of conversations that wait: all of them have room
MODEL = Shape()
FREE = 1 << 20  # groups: no bound
RULE = "measured"


class ToolPace(Struct, frozen=True):
    """Seconds of a tool on average; fixed numbers of episodes for each slot; and seconds: that the rule has to find its number
    before the first round, that a way has before it is measured, and for which it is."""

    tool: float
    fixed: tuple[int, ...]
    find: float
    settle: float
    measure: float


class ConcurrencySettings(Struct, frozen=True):
    rounds: int = 2
    paces: tuple[ToolPace, ...] = (
        ToolPace(0.0, (1, 2, 4), 20.0, 10.0, 15.0),
        ToolPace(1.0, (1, 2, 4, 8), 40.0, 12.0, 20.0),
        ToolPace(10.0, (4, 8, 16, 32), 150.0, 35.0, 35.0),
    )


QUICK = ConcurrencySettings(
    rounds=1, paces=(ToolPace(0.0, (1, 2, 4), 10.0, 5.0, 10.0), ToolPace(1.0, (2, 4, 8), 40.0, 10.0, 15.0))
)


class Way(Struct):
    """One number of episodes at once, or the rule, over its rounds: tokens a second, and means of what was under way."""

    name: str
    tokens_per_second: list[float]
    episodes: list[float]
    running: list[float]
    waiting: list[float]


class PaceReport(Struct):
    tool: float
    ways: list[Way]

    @property
    def ratios(self) -> list[float]:
        """Of the rule to the best fixed number of each round."""
        *fixed, rule = (way.tokens_per_second for way in self.ways)
        return [own / max(others) for own, *others in zip(rule, *fixed, strict=True)]


class ConcurrencyReport(Struct):
    slots: int
    paces: list[PaceReport]
    ratios: list[list[float]]


def run(settings: ConcurrencySettings, show: Callable[[str], None] = lambda line: None) -> ConcurrencyReport:
    """Raises UserError, ServiceFault."""

    async def measure() -> ConcurrencyReport:
        paces = [await _of_pace(pace, settings.rounds, show) for pace in settings.paces]
        return ConcurrencyReport(SLOTS, paces, [pace.ratios for pace in paces])

    return uvloop.run(measure())


async def _of_pace(pace: ToolPace, rounds: int, show: Callable[[str], None]) -> PaceReport:
    rule = Concurrency(GROUP, FREE)
    limits: dict[str, Concurrency | int] = {f"{each}": max(1, each * SLOTS // GROUP) for each in pace.fixed}
    limits[RULE] = rule
    ways = {name: Way(name, [], [], [], []) for name in limits}
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as temporary:
        async with running_gateway(Path(temporary), pace.tool) as played:
            show(f"tools of {pace.tool:g} s: the rule finds its number")
            await played.measure(rule, pace.find, 0.0)
            for number in range(rounds):
                for name in list(limits) if number % 2 else list(limits)[::-1]:
                    show(f"tools of {pace.tool:g} s, round {number + 1} of {rounds}: {name}")
                    await played.measure(limits[name], pace.settle, pace.measure, ways[name])
    return PaceReport(pace.tool, list(ways.values()))


# ----------------------------------------------------------------------------------------------------------------------
# The processes.


@asynccontextmanager
async def running_gateway(folder: Path, tool: float) -> AsyncIterator[PlayedGroups]:
    """With a rollout behind it, and programs that play."""
    await asyncio.to_thread(_configure, folder)
    registered: dict[str, asyncio.Future[Registration]] = {
        role: asyncio.get_running_loop().create_future() for role in ("rollout", "gateway")
    }

    async def register(registration: Registration) -> None:
        registered[registration.role].set_result(registration)

    coordinator = Server({"Coordinator": {"Register": register}})
    address = coordinator.bind(HOST, 0)
    await coordinator.start()
    try:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(service("rollout", folder, address))
            await stack.enter_async_context(service("gateway", folder, address))
            rollout, gateway = await asyncio.wait_for(asyncio.gather(*registered.values()), START)
            sessions = [
                await stack.enter_async_context(_session(rollout, "Rollout")),
                await stack.enter_async_context(_session(gateway, "Gateway")),
            ]
            serving = PeerAddress(
                name=rollout.name, incarnation=0, address=rollout.address, machine=rollout.machine, slots=SLOTS
            )
            await sessions[1].call("UpdateEndpoints", UpdateEndpoints(rollouts=(serving,), key=KEY), START)
            url = (folder / run_files.GATEWAYS / gateway.name).read_text()
            await stack.enter_async_context(_programs(ProgramSettings(url, KEY, tool, TURNS)))
            yield PlayedGroups(*sessions)
    finally:
        await coordinator.stop(0.0)


def _configure(folder: Path) -> None:
    """A tiny model with random weights: replies end at their longest, some before."""
    from runtime.models import tiny_model

    (folder / "model").mkdir()
    model = tiny_model.make_model(MODEL, tiny_model.write_tokenizer(folder / "model"))
    model.config.max_position_embeddings = CONTEXT
    model.save_pretrained(folder / "model")
    config = loading.load(CONFIG, ())
    assert isinstance(config.services.rollout, Rollout)
    rollout = replace(config.services.rollout, max_num_seqs=SLOTS, env={"OMP_NUM_THREADS": "1"})
    config = replace(
        config,
        run=replace(config.run, dir=str(folder)),
        model=replace(config.model, path=str(folder / "model")),
        sampling=replace(config.sampling, group_size=GROUP, max_new_tokens=REPLY),
        network=Network(security="none"),  # no agent gives keys
        gateway=Gateway(context=CONTEXT),
        services=replace(config.services, rollout=rollout),
    )
    (folder / run_files.CONFIG).write_text(loading.to_yaml(config))


@asynccontextmanager
async def _session(to: Registration, kind: str) -> AsyncIterator[Session]:
    session = Session(Channel(to.address), to.name, kind, to.machine)
    await session.open(START)
    try:
        yield session
    finally:
        await session.close()


@asynccontextmanager
async def _programs(settings: ProgramSettings) -> AsyncIterator[None]:
    """Raises ServiceFault where some failed."""
    command = start.command("benchmarks.concurrency_trial", python=sys.executable)
    process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(msgspec.json.encode(settings) + b"\n")
        await asyncio.wait_for(process.stdout.readline(), START)
        yield
        process.stdin.close()
        failures = (await asyncio.wait_for(process.stdout.readline(), START)).decode().strip()
        if failures != "{}":
            raise ServiceFault("programs", "play", f"failed: {failures or 'they ended without a word'}")
    finally:
        await end(process)


# ----------------------------------------------------------------------------------------------------------------------
# What the coordinator does.


class PlayedGroups:
    """Has groups played, so many at once."""

    def __init__(self, rollout: Session, gateway: Session):
        self._rollout, self._gateway = rollout, gateway
        self._under_way: set[asyncio.Task[object]] = set()
        self._ids = count()
        self._told: dict[str, dict[str, float]] = {}

    async def measure(self, limit: Concurrency | int, settle: float, seconds: float, way: Way | None = None) -> None:
        """From nothing under way to nothing again. `way` gets what came of `seconds`, after `settle`."""
        try:
            await self._play(limit, settle)
            if way is not None:
                before, began = self._told["rollout"]["tokens_total"], time.perf_counter()
                looks = await self._play(limit, seconds)
                took = time.perf_counter() - began
                way.tokens_per_second.append((self._told["rollout"]["tokens_total"] - before) / took)
                way.episodes.append(fmean(look.episodes for look in looks))
                way.running.append(fmean(look.running for look in looks))
                way.waiting.append(fmean(look.waiting for look in looks))
        finally:
            await self._withdraw()

    async def _play(self, limit: Concurrency | int, seconds: float) -> list[Load]:
        """What was told meanwhile; the last at the end."""
        looks: list[Load] = []
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            most = limit if isinstance(limit, int) else limit.limit(SLOTS)
            due = time.perf_counter() + timeouts.STATUS_INTERVAL
            while (left := due - time.perf_counter()) > 0:
                self._fill(most)
                done, self._under_way = await asyncio.wait(self._under_way, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            looks.append(await self._look())
            if isinstance(limit, Concurrency):
                limit.look(looks[-1], len(self._under_way))
        return looks

    def _fill(self, most: int) -> None:
        task, sampling = EpisodeTask(messages=[{"role": "user", "content": "Begin."}]), SamplingParams(max_new_tokens=REPLY)
        while len(self._under_way) < most:
            id = next(self._ids)
            request = RunEpisodesRequest(group_id=id, task=task, n=GROUP, seed=id, sampling=sampling)
            self._under_way.add(asyncio.create_task(self._gateway.call("RunEpisodes", request, DEADLINE)))

    async def _look(self) -> Load:
        before = self._told
        statuses = await asyncio.gather(*(each.unary("Process", "Status") for each in (self._rollout, self._gateway)))
        self._told = {status.role: status.gauges for status in statuses}
        load = load_of(before, self._told)
        assert load is not None
        return load

    async def _withdraw(self) -> None:
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)
        self._under_way = set()
        until = time.perf_counter() + START
        with suppress(SluiceError):  # what went wrong before is told
            while (load := await self._look()).episodes or load.running:
                if time.perf_counter() > until:
                    raise DeadlineExceeded("gateway", "RunEpisodes", "withdrawn groups are still under way", START)
                await asyncio.sleep(timeouts.STATUS_INTERVAL)


# ----------------------------------------------------------------------------------------------------------------------


def compared(report: ConcurrencyReport) -> list[Compared]:
    return [Compared(f"{RULE} / the best fixed number, tools of {pace.tool:g} s", pace.ratios) for pace in report.paces]


def render(report: ConcurrencyReport) -> list[LiteralTable]:
    title = f"{report.slots} slots, groups of {GROUP} episodes of {TURNS[0]} to {TURNS[1]} turns"
    names = ("tool, s", "episodes a slot", "tokens/s", "episodes at once", "running", "waiting")
    table = LiteralTable(*names, title=title, title_justify="left")
    for pace in report.paces:
        for way in pace.ways:
            rate, *means = (fmean(each) for each in (way.tokens_per_second, way.episodes, way.running, way.waiting))
            table.add_row(f"{pace.tool:g}", way.name, f"{rate:,.0f}", *(f"{each:.0f}" for each in means))
    told = "; ".join(f"{pace.tool:g} s: {_shown(pace.ratios)}" for pace in report.paces)
    table.caption = f"{RULE} / the best fixed number of the same round, by tool: {told}"
    return [table]


def _shown(ratios: Sequence[float]) -> str:
    return ", ".join(f"{ratio:.2f}" for ratio in ratios)
