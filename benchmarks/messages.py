"""`sluice bench messages`: what a message costs between two processes, beside grpc.aio's plain unary calls.

All goes over loopback, to one process that answers at once (`messages_trial`). The plain side sends bytes and decodes nothing;
ours is the whole path: the message's struct, protobuf, the other end's actor and back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from statistics import median, quantiles

import grpc
import numpy as np
import uvloop
from msgspec import Struct

from benchmarks.process import end
from runtime.commands import CommitWeights
from runtime.errors import DeadlineExceeded, ServiceFault
from runtime.telemetry.shown import LiteralTable
from runtime.types import GroupRequest, PolicyVersion, SamplingParams
from services.rpc import contract
from services.rpc.session import Session, call
from sluice import start

START = 60.0  # seconds
TIMEOUT = 30.0  # seconds of any call
PLAIN, STREAM, UNARY = "grpc.aio unary, plain bytes", "ours, over the session's stream", "ours, a unary call"
COMMIT = CommitWeights(PolicyVersion(0, 1), 1)
PROMPT = np.arange(16, dtype=np.int32)

Ask = Callable[[int], Awaitable[object]]


class MessagesSettings(Struct, frozen=True):
    rounds: int = 5
    pings: int = 400  # of a way in a round, one after the other
    calls: int = 4000  # of a way in a round, many at once
    in_flight: tuple[int, ...] = (100, 1000)


class Pings(Struct):
    """Microseconds, over all rounds."""

    p50: float
    p90: float


class MessagesReport(Struct):
    """`rates`: calls per second by way, the median of the rounds; `ratios`: ours over plain, round by round, the median."""

    pings: dict[str, Pings]
    ping_ratio: float
    rates: dict[int, dict[str, float]]
    ratios: dict[int, float]


class _Peer:
    """The other end, by each way."""

    def __init__(self, session: Session, plain: grpc.aio.Channel, ours: grpc.aio.Channel, trial: str):
        stub = plain.unary_unary(trial)
        message = contract.METHODS["Rollout", "CommitWeights"].request.serialize(COMMIT)
        self._session = session
        self.pings: dict[str, Ask] = {
            PLAIN: lambda _: stub(message, timeout=TIMEOUT),
            STREAM: lambda _: session.call("CommitWeights", COMMIT, TIMEOUT),
            UNARY: lambda _: call(ours, "rollout-0", contract.METHODS["Rollout", "CommitWeights"], COMMIT, TIMEOUT),
        }
        self.rates: dict[str, Ask] = {PLAIN: self.pings[PLAIN], STREAM: self._generate}

    async def _generate(self, number: int) -> object:
        sampling = SamplingParams(max_new_tokens=16)
        request = GroupRequest(group_id=number, prompt=PROMPT, n=1, seed=number, sampling=sampling)
        return await self._session.call("Generate", request, TIMEOUT)


def run(settings: MessagesSettings, show: Callable[[str], None] = lambda line: None) -> MessagesReport:
    """On the services' own event loop. Raises ServiceFault."""
    return uvloop.run(measure(settings, show))


async def measure(settings: MessagesSettings, show: Callable[[str], None]) -> MessagesReport:
    async with _peer() as peer:
        for ask in (*peer.pings.values(), *peer.rates.values()):  # connections are made with the first call
            await ask(0)
        seconds: dict[str, list[float]] = {way: [] for way in peer.pings}
        ratios: list[float] = []
        for number in range(settings.rounds):
            show(f"round {number + 1} of {settings.rounds}: one call after the other")
            found = {way: await _pings(ask, settings.pings) for way, ask in peer.pings.items()}
            ratios.append(median(found[STREAM]) / median(found[PLAIN]))
            for way, each in found.items():
                seconds[way] += each
        report = MessagesReport({way: _summary(each) for way, each in seconds.items()}, median(ratios), {}, {})
        for in_flight in settings.in_flight:
            rates: dict[str, list[float]] = {way: [] for way in peer.rates}
            for number in range(settings.rounds):
                show(f"round {number + 1} of {settings.rounds}: {in_flight} calls at once")
                for way, ask in peer.rates.items():
                    rates[way].append(await _rate(ask, settings.calls, in_flight))
            report.rates[in_flight] = {way: median(each) for way, each in rates.items()}
            report.ratios[in_flight] = median(ours / plain for ours, plain in zip(rates[STREAM], rates[PLAIN], strict=True))
    return report


@asynccontextmanager
async def _peer() -> AsyncIterator[_Peer]:
    from benchmarks.messages_trial import PLAIN as PATH

    process = await asyncio.create_subprocess_exec(
        *start.command("benchmarks.messages_trial"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), START)
        ours, _, plain = line.decode().strip().partition(" ")
        if not plain:
            raise ServiceFault("messages_trial", "start", "ended without its addresses; its standard error says why")
        session = Session(ours, "rollout-0", "Rollout")
        await session.open(START)
        async with grpc.aio.insecure_channel(plain) as raw, grpc.aio.insecure_channel(ours) as channel:
            yield _Peer(session, raw, channel, PATH)
            await session.close()
    except asyncio.TimeoutError:
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


def render(report: MessagesReport) -> list[LiteralTable]:
    pings = LiteralTable("way", "p50, µs", "p90, µs", title="One call after the other", title_justify="left")
    for way, each in report.pings.items():
        pings.add_row(way, f"{each.p50:.0f}", f"{each.p90:.0f}")
    pings.caption = f"the stream's p50 is {report.ping_ratio:.2f} of plain grpc.aio's"
    rates = LiteralTable(
        "calls at once", "plain, calls/s", "stream, calls/s", "ratio", title="Many calls at once", title_justify="left"
    )
    for in_flight, rate in report.rates.items():
        rates.add_row(str(in_flight), f"{rate[PLAIN]:,.0f}", f"{rate[STREAM]:,.0f}", f"{report.ratios[in_flight]:.2f}")
    return [pings, rates]
