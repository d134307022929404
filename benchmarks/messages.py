"""`sluice bench messages`: what a message costs between two processes, beside grpc.aio's plain unary calls.

All goes over loopback, to one process that answers at once (`messages_trial`). The plain side sends bytes and decodes nothing;
ours is the whole path: the message's struct, protobuf, the other end's actor and back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from statistics import median, quantiles

import grpc
import numpy as np
import uvloop
from msgspec import Struct

from benchmarks.compared import Compared
from benchmarks.process import end
from runtime.commands import CommitWeights
from runtime.errors import DeadlineExceeded, ServiceFault
from runtime.process import keys
from runtime.telemetry.shown import LiteralTable
from runtime.types import GroupRequest, PolicyVersion, SamplingParams
from services.rpc import contract
from services.rpc.client import Channel, Session, call
from sluice import start

START = 60.0  # seconds
TIMEOUT = 30.0  # seconds of any call
PLAIN, UNARY = "grpc.aio unary, plain bytes", "ours, a unary call: none"
STREAM, TOKEN, TLS = (f"ours, by stream: {mode}" for mode in ("none", "token", "tls"))
COMMIT = CommitWeights(PolicyVersion(0, 1), 1)
PROMPT = np.arange(16, dtype=np.int32)

Ask = Callable[[int], Awaitable[object]]


class MessagesSettings(Struct, frozen=True):
    rounds: int = 10
    pings: int = 400  # of a way in a round, one after the other
    calls: int = 4000  # of a way in a round, many at once
    in_flight: tuple[int, ...] = (100, 1000)


QUICK = MessagesSettings(rounds=4)


class Pings(Struct):
    """Microseconds, over all rounds."""

    p50: float
    p90: float


class MessagesReport(Struct):
    """`rates`: calls per second by way, the median of the rounds. The ratios are of our ways, round by round, the median:
    without security to the plain way, with it to that without."""

    pings: dict[str, Pings]
    ping_ratios: dict[str, float]
    rates: dict[int, dict[str, float]]
    ratios: dict[int, dict[str, float]]


class _Peer:
    """The other end, by each way."""

    def __init__(self, sessions: dict[str, Session], plain: grpc.aio.Channel, ours: Channel, trial: str):
        stub = plain.unary_unary(trial)
        message = contract.METHODS["Rollout", "CommitWeights"].request.serialize(COMMIT)
        self.pings: dict[str, Ask] = {
            PLAIN: lambda _: stub(message, timeout=TIMEOUT),
            UNARY: lambda _: call(ours, "rollout-0", contract.METHODS["Rollout", "CommitWeights"], COMMIT, TIMEOUT),
            **{way: partial(_commit, session) for way, session in sessions.items()},
        }
        self.rates: dict[str, Ask] = {
            PLAIN: self.pings[PLAIN],
            **{way: partial(_generate, session) for way, session in sessions.items()},
        }


async def _commit(session: Session, _: int) -> object:
    return await session.call("CommitWeights", COMMIT, TIMEOUT)


async def _generate(session: Session, number: int) -> object:
    sampling = SamplingParams(max_new_tokens=16)
    request = GroupRequest(group_id=number, prompt=PROMPT, n=1, seed=number, sampling=sampling)
    return await session.call("Generate", request, TIMEOUT)


def run(settings: MessagesSettings, show: Callable[[str], None] = lambda line: None) -> MessagesReport:
    """On the services' own event loop. Raises ServiceFault."""
    return uvloop.run(measure(settings, show))


async def measure(settings: MessagesSettings, show: Callable[[str], None]) -> MessagesReport:
    async with _peer() as peer:
        for ask in (*peer.pings.values(), *peer.rates.values()):  # connections are made with the first call
            await ask(0)
        seconds: dict[str, list[float]] = {way: [] for way in peer.pings}
        medians: dict[str, list[float]] = {way: [] for way in peer.pings}
        for number in range(settings.rounds):
            show(f"round {number + 1} of {settings.rounds}: one call after the other")
            for way, ask in _in_turn(peer.pings, number):
                found = await _pings(ask, settings.pings)
                medians[way].append(median(found))
                seconds[way] += found
        report = MessagesReport({way: _summary(each) for way, each in seconds.items()}, _ratios(medians), {}, {})
        for in_flight in settings.in_flight:
            rates: dict[str, list[float]] = {way: [] for way in peer.rates}
            for number in range(settings.rounds):
                show(f"round {number + 1} of {settings.rounds}: {in_flight} calls at once")
                for way, ask in _in_turn(peer.rates, number):
                    rates[way].append(await _rate(ask, settings.calls, in_flight))
            report.rates[in_flight] = {way: median(each) for way, each in rates.items()}
            report.ratios[in_flight] = _ratios(rates)
    return report


def _in_turn(ways: dict[str, Ask], number: int) -> list[tuple[str, Ask]]:
    """Another way begins each round: what comes later finds the machine otherwise."""
    found = list(ways.items())
    return found[number % len(found) :] + found[: number % len(found)]


def _ratios(measured: dict[str, list[float]]) -> dict[str, float]:
    beside = {way: STREAM if way in (TOKEN, TLS) else PLAIN for way in measured if way != PLAIN}
    return {
        way: median(ours / theirs for ours, theirs in zip(measured[way], measured[other], strict=True))
        for way, other in beside.items()
    }


@asynccontextmanager
async def _peer() -> AsyncIterator[_Peer]:
    from benchmarks.messages_trial import NETWORKS, SECRET
    from benchmarks.messages_trial import PLAIN as PATH

    process = await asyncio.create_subprocess_exec(
        *start.command("benchmarks.messages_trial"), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), START)
        plain, *ours = line.decode().split()
        if not ours:
            raise ServiceFault("messages_trial", "start", "ended without its addresses; its standard error says why")
        own = [keys.holder(network, keys.COORDINATOR, SECRET) for network in NETWORKS.values()]
        sessions = [
            Session(Channel(address, each, "rollout-0/0"), "rollout-0", "Rollout")
            for address, each in zip(ours, own, strict=True)
        ]
        for session in sessions:
            await session.open(START)
        async with grpc.aio.insecure_channel(plain) as raw, Channel(ours[0]) as channel:
            yield _Peer(dict(zip((STREAM, TOKEN, TLS), sessions, strict=True)), raw, channel, PATH)
            for session in sessions:
                await session.close()
    except TimeoutError:
        raise DeadlineExceeded("messages_trial", "start", "did not begin to serve", START) from None
    finally:
        await end(process)


async def _pings(ask: Ask, count: int) -> list[float]:
    seconds = []
    for number in range(count):
        began = time.perf_counter()
        await ask(number)
        seconds.append(time.perf_counter() - began)
    return seconds


async def _rate(ask: Ask, count: int, in_flight: int) -> float:
    numbers = iter(range(count))

    async def work() -> None:
        for number in numbers:
            await ask(number)

    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(in_flight)))
    return count / (time.perf_counter() - began)


def _summary(seconds: list[float]) -> Pings:
    return Pings(p50=median(seconds) * 1e6, p90=quantiles(seconds, n=10)[-1] * 1e6)


def compared(report: MessagesReport) -> list[Compared]:
    """Medians of the rounds."""
    return [
        *(Compared(f"one call after the other, {way}", [ratio]) for way, ratio in report.ping_ratios.items()),
        *(
            Compared(f"calls/s, {in_flight} at once, {way}", [ratio])
            for in_flight, ratios in report.ratios.items()
            for way, ratio in ratios.items()
        ),
    ]


def render(report: MessagesReport) -> list[LiteralTable]:
    pings = LiteralTable("way", "p50, µs", "p90, µs", "ratio of p50", title="One call after the other", title_justify="left")
    for way, each in report.pings.items():
        pings.add_row(way, f"{each.p50:.0f}", f"{each.p90:.0f}", _shown(report.ping_ratios, way))
    rates = LiteralTable("calls at once", "way", "calls/s", "ratio", title="Many calls at once", title_justify="left")
    for in_flight, rate in report.rates.items():
        for way, calls in rate.items():
            rates.add_row(str(in_flight), way, f"{calls:,.0f}", _shown(report.ratios[in_flight], way))
    rates.caption = "ratios: without security to plain grpc.aio, with it to that without"
    return [pings, rates]


def _shown(ratios: dict[str, float], way: str) -> str:
    return f"{ratios[way]:.3f}" if way in ratios else ""
