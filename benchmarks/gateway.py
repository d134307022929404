"""`sluice bench gateway`: a thousand programs that play at once, and how late the gateway's event loop comes to what is due.

The gateway is a process of its own, as in a run; the bench plays the coordinator, which has groups of episodes played. Rollouts
answer from a script (`gateway_script`), and so do the tools; the programs are one more process, with real HTTP. The same
programs call a plain aiohttp server, and vLLM's own where it is installed.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from operator import truediv
from pathlib import Path

import aiohttp
import msgspec
import psutil
import uvloop
from msgspec import Struct
from msgspec.structs import replace

from benchmarks.compared import Compared
from benchmarks.gateway_script import write_model
from benchmarks.gateway_trial import HOST, Played, TrialSettings
from benchmarks.inputs import CONFIG
from benchmarks.process import end, service
from benchmarks.rollout import DEFAULT_PYTHON, interpreter
from runtime import run_files, types
from runtime.commands import PeerAddress, UpdateEndpoints
from runtime.config import Gateway, Network, loading
from runtime.errors import DeadlineExceeded, ServiceFault
from runtime.status import Registration
from runtime.telemetry.shown import LiteralTable
from runtime.types import EpisodeTask, GeneratedGroup, GroupPayload, RunEpisodesRequest, SamplingParams
from services.rpc.client import Channel, Session
from services.rpc.server import Server
from sluice import start

START = 120.0  # seconds
DEADLINE = 600.0  # of one load
LOOK = 0.5  # between two looks at the gateway's gauges
CONTEXT = 4096  # tokens
KEY = "of-the-programs"
AIM = 20.0  # ms, the 99th percentile of the gateway's lag at the first pace
OURS, PLAIN, VLLM = "gateway", "plain aiohttp", "vLLM's server"
SHARES = (0.5, 0.99)


class GatewayPace(Struct, frozen=True):
    """Seconds that a generation takes, and a program between two calls: on average, as in TrialSettings."""

    reply: float
    tool: float


class GatewayBenchSettings(Struct, frozen=True):
    episodes: int = 1000  # a multiple of `group`
    turns: int = 10
    group: int = 8
    paces: tuple[GatewayPace, ...] = (GatewayPace(2.0, 1.5), GatewayPace(0.0, 0.0))


QUICK = GatewayBenchSettings(episodes=200, turns=4, paces=(GatewayPace(0.5, 0.5),))


class ServerLoad(Struct):
    """What one server did with one load. Seconds; `lags`: p50, p99 and the most of its event loop; `latencies`: p50 and p99 of
    a call; `waited`: how long its main thread was ready to run and had no core (Linux); `memory`: bytes, resident."""

    server: str
    pace: GatewayPace
    calls: int
    seconds: float
    failures: dict[str, int]
    lags: list[float]
    latencies: list[float]
    cpu_seconds: float
    waited: float
    memory: int


class GatewayBenchReport(Struct):
    episodes: int
    turns: int
    loads: list[ServerLoad]


def run(
    settings: GatewayBenchSettings, vllm_python: Path | None, show: Callable[[str], None] = lambda line: None
) -> GatewayBenchReport:
    """Each pace and server in turn. `vllm_python`: None for that of `make install-vllm`, where it is there. Raises UserError,
    ServiceFault."""
    ways: dict[str, Callable[[Path, TrialSettings, int], Awaitable[ServerLoad]]] = {
        OURS: _gateway,
        PLAIN: partial(_beside, PLAIN, ("benchmarks.gateway_trial", "echo"), sys.executable),
    }
    if vllm_python is not None or shutil.which(DEFAULT_PYTHON):
        ways[VLLM] = partial(_beside, VLLM, ("benchmarks.gateway_vllm",), interpreter(vllm_python or DEFAULT_PYTHON))

    async def measure() -> GatewayBenchReport:
        report = GatewayBenchReport(settings.episodes, settings.turns, [])
        for pace in settings.paces:
            for name, way in ways.items():
                show(f"{name}: {settings.episodes} episodes of {settings.turns} turns, {pace.reply:g} s a reply")
                report.loads.append(await _measured(name, way, pace, settings))
        return report

    return uvloop.run(measure())


async def _measured(
    name: str,
    way: Callable[[Path, TrialSettings, int], Awaitable[ServerLoad]],
    pace: GatewayPace,
    settings: GatewayBenchSettings,
) -> ServerLoad:
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as temporary:
        folder = Path(temporary)
        await asyncio.to_thread(write_model, folder / "model", CONTEXT)
        trial = TrialSettings(
            model=str(folder / "model"),
            context=CONTEXT,
            episodes=settings.episodes,
            turns=settings.turns,
            reply=pace.reply,
            tool=pace.tool,
        )
        try:
            return await asyncio.wait_for(way(folder, trial, settings.group), START + DEADLINE)
        except TimeoutError:
            raise DeadlineExceeded(name, "load", "did not end", START + DEADLINE) from None


# ----------------------------------------------------------------------------------------------------------------------
# Other processes.


@asynccontextmanager
async def _started(
    what: Sequence[str], trial: TrialSettings, python: str = sys.executable
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A process of the bench, and the first line that it prints."""
    process = await asyncio.create_subprocess_exec(
        *start.command(*what, python=python),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 26,  # of a line: the seconds of each call
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(msgspec.json.encode(trial) + b"\n")
        line = (await process.stdout.readline()).decode().strip()
        if not line:
            raise ServiceFault(what[-1], "run", "ended without a word; its standard error says why")
        yield process, line
    finally:
        await end(process)


async def _played(trial: TrialSettings) -> Played:
    async with _started(("benchmarks.gateway_trial", "load"), trial) as (_, line):
        return msgspec.json.decode(line, type=Played)


async def _beside(name: str, what: Sequence[str], python: str, folder: Path, trial: TrialSettings, group: int) -> ServerLoad:
    """A server that tells its lags, and has no episodes. Its first calls import what it needs, and are not counted."""
    async with _started(what, trial, python) as (process, url):
        await _played(replace(trial, url=url, episodes=1, turns=2, tool=0.0))
        await _lags(url)
        costs = ServerCosts(process.pid)
        played = await _played(replace(trial, url=url))
        return costs.of(name, trial, played, await _lags(url))


async def _lags(url: str) -> list[float]:
    """Since they were asked for before."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/lags") as answer:
        return msgspec.json.decode(await answer.read(), type=list[float])


class ServerCosts:
    """Of a process, from now on."""

    def __init__(self, pid: int):
        self._process = psutil.Process(pid)
        self._cpu, self._waited = self._now()

    def of(self, server: str, trial: TrialSettings, played: Played, lags: list[float]) -> ServerLoad:
        cpu, waited = self._now()
        calls = sorted(played.calls) or [0.0]
        return ServerLoad(
            server=server,
            pace=GatewayPace(trial.reply, trial.tool),
            calls=len(played.calls),
            seconds=played.seconds,
            failures=played.failures,
            lags=lags,
            latencies=[calls[int(share * len(calls))] for share in SHARES],
            cpu_seconds=cpu - self._cpu,
            waited=waited - self._waited,
            memory=self._process.memory_info().rss,
        )

    def _now(self) -> tuple[float, float]:
        times, schedule = self._process.cpu_times(), Path(f"/proc/{self._process.pid}/schedstat")
        waited = int(schedule.read_text().split()[1]) / 1e9 if schedule.exists() else 0.0
        return times.user + times.system, waited


# ----------------------------------------------------------------------------------------------------------------------
# The gateway, and what it needs of a coordinator.


async def _gateway(folder: Path, trial: TrialSettings, group: int) -> ServerLoad:
    await asyncio.to_thread(_configure, folder, trial)
    registered: asyncio.Future[Registration] = asyncio.get_running_loop().create_future()

    async def register(registration: Registration) -> None:
        registered.set_result(registration)

    coordinator = Server({"Coordinator": {"Register": register}})
    address = coordinator.bind(HOST, 0)
    await coordinator.start()
    try:
        async with (
            _started(("benchmarks.gateway_trial", "rollout"), trial) as (_, rollout),
            service("gateway", folder, address),
        ):
            known = await asyncio.wait_for(registered, START)
            session = Session(Channel(known.address), known.name, "Gateway", known.machine)
            await session.open(START)
            try:
                serving = PeerAddress(name="rollout-0", incarnation=0, address=rollout, machine="", slots=trial.episodes)
                await session.call("UpdateEndpoints", UpdateEndpoints(rollouts=(serving,), key=KEY), START)
                url = (folder / run_files.GATEWAYS / known.name).read_text()
                return await _group_by_group(session, known.pid, replace(trial, url=url, key=KEY), group)
            finally:
                await session.close()
    finally:
        await coordinator.stop(0.0)


def _configure(folder: Path, trial: TrialSettings) -> None:
    config = loading.load(CONFIG, ())
    config = replace(
        config,
        run=replace(config.run, dir=str(folder)),
        model=replace(config.model, path=trial.model),
        network=Network(security="none"),  # no agent gives keys
        gateway=Gateway(context=CONTEXT),
    )
    (folder / run_files.CONFIG).write_text(loading.to_yaml(config))


async def _group_by_group(session: Session, pid: int, trial: TrialSettings, size: int) -> ServerLoad:
    """Has the episodes played, as groups of `size`."""
    task, sampling = EpisodeTask(messages=[{"role": "user", "content": "Begin."}]), SamplingParams(max_new_tokens=512)
    groups = [
        asyncio.create_task(
            session.call(
                "RunEpisodes", RunEpisodesRequest(group_id=id, task=task, n=size, seed=id, sampling=sampling), DEADLINE
            )
        )
        for id in range(trial.episodes // size)
    ]
    costs, most = ServerCosts(pid), [0.0]
    looking = asyncio.create_task(_look(session, most))
    try:
        played = await _played(trial)
        gauges = (await session.unary("Process", "Status")).gauges
        found: list[GeneratedGroup] = await asyncio.gather(*groups)
    finally:
        for each in (looking, *groups):
            each.cancel()
    if not played.failures:
        check(found, trial.turns)
    lags = [gauges["loop_lag_p50"], gauges["loop_lag_p99"], max(*most, gauges["loop_lag_max"])]
    return costs.of(OURS, trial, played, lags)


async def _look(session: Session, most: list[float]) -> None:
    """The gauge tells of the newest looks at the loop alone."""
    while True:
        await asyncio.sleep(LOOK)
        most.append((await session.unary("Process", "Status")).gauges["loop_lag_max"])


def check(groups: Sequence[GeneratedGroup], turns: int) -> None:
    """That each episode is one row, and each of its replies is trained. Raises ServiceFault."""
    for group in groups:
        payload = types.decode(GroupPayload, group.payload)
        trained = int((payload.loss_mask.values != 0).sum())
        if len(payload.lengths) != payload.n or trained != turns * payload.n:
            what = f"{payload.n} episodes of {turns} turns are {len(payload.lengths)} rows with {trained} trained replies"
            raise ServiceFault(OURS, "play", f"group {group.group_id}: {what}")


# ----------------------------------------------------------------------------------------------------------------------


def compared(report: GatewayBenchReport) -> list[Compared]:
    """Processor time a call, ours to that of others, one value a pace."""
    costs: dict[str, list[float]] = {}
    for load in report.loads:
        costs.setdefault(load.server, []).append(load.cpu_seconds / load.calls)
    return [
        Compared(f"processor time a call, {OURS} / {name}", list(map(truediv, costs[OURS], found)))
        for name, found in costs.items()
        if name != OURS
    ]


def render(report: GatewayBenchReport) -> list[LiteralTable]:
    title = f"{report.episodes:,} episodes at once, {report.turns} turns each"
    names = ("reply, s", "server", "calls/s", "lag, ms: p50, p99, most", "call, s: p50, p99", "cpu, ms", "failed")
    table = LiteralTable(*names, title=title, title_justify="left")
    for load in report.loads:
        table.add_row(
            f"{load.pace.reply:g}",
            load.server,
            f"{load.calls / load.seconds:,.0f}",
            ", ".join(f"{1e3 * lag:.0f}" for lag in load.lags),
            ", ".join(f"{latency:.2f}" for latency in load.latencies),
            f"{1e3 * load.cpu_seconds / max(1, load.calls):.2f}",
            ", ".join(f"{count} {what}" for what, count in sorted(load.failures.items())) or "none",
        )
    caption = f"lag: of the server's event loop; cpu: of the server, a call; aim: a p99 of the gateway's lag of {AIM:g} ms"
    caption += " at the first pace, and nothing that failed"
    if all(load.server != VLLM for load in report.loads):
        caption += f"; vLLM is left out: there is no {DEFAULT_PYTHON}; make install-vllm makes it"
    table.caption = caption
    return [table]
