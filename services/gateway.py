"""The gateway role: agents call it like the APIs of OpenAI or Anthropic. `python -m services.gateway`.

agents ── HTTP ──► application (runtime/gateway/http.py) ──► Episodes ──► PolicyCalls ──► RolloutSessions ──► rollouts
   ▲                                                          ▲    │
   │            coordinator ── RunEpisodes, FinishGroup, UpdateEndpoints ─────────┘    ▼
environments ◄── Run, Cancel ── EnvironmentChannels ◄────────── Players"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import ssl
import sys
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from msgspec.structs import replace

from runtime import run_files, timeouts, types
from runtime.cluster.topology import players
from runtime.commands import FinishGroup, PeerAddress, UpdateEndpoints
from runtime.config import Config
from runtime.data.tokenizer import Tokenizer
from runtime.environments.messages import CancelRequest, EnvironmentDescription, EpisodeEvent, EpisodeRequest
from runtime.errors import InvalidMessage, ServiceFault, Unreachable, UserError
from runtime.gateway.calls import PolicyCalls
from runtime.gateway.episodes import Episodes
from runtime.gateway.http import server
from runtime.gateway.placement import PlacedCall, RolloutCost, beginnings, cheapest
from runtime.gateway.players import EpisodeRunner
from runtime.gateway.rendering import renderer_of
from runtime.models.limits import longest_text
from runtime.process import keys, network
from runtime.process.http_server import HttpServer
from runtime.process.waiting import done_within, now
from runtime.types import GeneratedGroup, GroupPayload, GroupRequest, PolicyVersion, RunEpisodesRequest, Sample, SamplingParams
from services import process
from services.blobs import BlobKeeper
from services.rpc import contract, security
from services.rpc.client import Channel, Session
from services.rpc.server import OPTIONS

# ---- Environment channels

DESCRIBE, RUN, CANCEL = (contract.METHODS["Environment", name] for name in ("Describe", "Run", "Cancel"))


class EnvironmentChannel:
    """Implements `runtime.gateway.players.EnvironmentPort`. Made on the event loop."""

    def __init__(self, name: str, channel: Any, metadata: Sequence[tuple[str, str]]):
        self.name = name
        self._channel, self._metadata = channel, tuple(metadata)
        self._closed = False
        self._under_way = set[Any]()  # calls: gRPC does not end a call that is being read when its channel closes

    async def run(self, request: EpisodeRequest) -> AsyncGenerator[EpisodeEvent, None]:
        call = self._channel.unary_stream(RUN.path, RUN.request.serialize)(request, metadata=self._metadata)
        self._under_way.add(call)
        try:
            async for data in call:
                yield RUN.reply.parse(data)
        except (grpc.aio.AioRpcError, InvalidMessage) as error:
            raise self._lost(RUN, error) from None
        except asyncio.CancelledError:  # gRPC raises this too in a call that `close` cancelled
            if not self._closed:
                raise
            raise Unreachable(self.name, "Run", "it no longer serves") from None
        finally:
            self._under_way.discard(call)
            call.cancel()

    async def describe(self, seconds: float) -> EnvironmentDescription:
        """Return the server's description. Raises Unreachable if it does not answer within `seconds`."""
        found: EnvironmentDescription = await self._call(DESCRIBE, None, seconds, wait_for_ready=True)
        return found

    async def cancel(self, episode: str) -> None:
        await self._call(CANCEL, CancelRequest(episode), timeouts.CONTROL_CALL)

    async def _call(self, method: contract.Method, request: Any, timeout: float, **how: Any) -> Any:
        stub = self._channel.unary_unary(method.path, method.request.serialize)
        try:  # replies are parsed here: gRPC would only log an exception of its deserializer
            return method.reply.parse(await stub(request, timeout=timeout, metadata=self._metadata, **how))
        except (grpc.aio.AioRpcError, InvalidMessage) as error:
            raise self._lost(method, error) from None

    async def close(self) -> None:
        """Close the channel. Calls under way end with Unreachable."""
        self._closed = True
        for call in self._under_way:
            call.cancel()
        await self._channel.close()

    def _lost(self, method: contract.Method, error: Exception) -> Unreachable:
        if isinstance(error, grpc.aio.AioRpcError):
            return Unreachable(self.name, method.name, f"{error.code().name}: {security.in_words(error.details() or '')}")
        return Unreachable(self.name, method.name, str(error))


class EnvironmentChannels:
    """One channel to each process, by the name of its environment."""

    def __init__(self, config: Config, own_keys: keys.Keys | None):
        """Open the channels to the user's servers. Raises UserError if a token is not in this process's environment."""
        self._config, self._keys = config, own_keys
        self._own: dict[PeerAddress, EnvironmentChannel] = {}
        self._paths = players(config)
        self._servers: dict[str, EnvironmentChannel] = {}
        for name, settings in config.services.environment.items():
            if (to := settings.server) is not None:
                channel = security.to_server(to, f"services.environment.{name}.server", OPTIONS)
                self._servers[name] = EnvironmentChannel(f"{name} at {to.address}", *channel)

    async def check(self) -> None:
        """Check that the user's servers answer. Raises UserError if a server does not answer within `deadlines.keepalive`."""
        silence = self._config.deadlines.keepalive
        for name, channel in self._servers.items():
            try:
                await channel.describe(silence)
            except Unreachable as error:
                what = f"no Environment answers within {silence:g} s: {error.reason}"
                raise UserError(f"services.environment.{name}.server.address: {what}") from None

    def use(self, processes: Sequence[PeerAddress]) -> list[EnvironmentChannel]:
        """Use these processes of the run from now on. Returns the channels to the others, for the caller to close."""
        left = [self._own.pop(address) for address in list(self._own) if address not in processes]
        silence = self._config.deadlines.keepalive
        for to in processes:
            if to not in self._own:
                channel = Channel(to.address, self._keys, keys.process(to.name, to.incarnation), silence, to.token)
                self._own[to] = EnvironmentChannel(to.name, channel.grpc, channel.metadata)
        return left

    def by_name(self) -> dict[str, list[EnvironmentChannel]]:
        found = {name: [channel] for name, channel in self._servers.items()}
        for address, channel in self._own.items():
            found.setdefault(self._paths[address.name].rpartition(".")[2], []).append(channel)
        return found

    async def close(self) -> None:
        for channel in [*self._own.values(), *self._servers.values()]:
            await channel.close()


log = logging.getLogger("sluice")

GENERATE = contract.METHODS["Rollout", "Generate"]
LAGS = 1024  # the newest measurements of the event loop that are kept
YOUNG = 200_000  # new objects before the garbage collector runs


class RolloutSessions:
    """Sessions to the rollouts that the coordinator names. Each call goes to the rollout where it costs least."""

    def __init__(self, config: Config, own_keys: keys.Keys | None):
        self._config, self._keys = config, own_keys
        self._sessions: dict[PeerAddress, Session] = {}
        self._costs: dict[PeerAddress, RolloutCost] = {}
        self._version = PolicyVersion()  # the newest of all replies
        self._changed = asyncio.Event()

    async def use(self, rollouts: Sequence[PeerAddress]) -> None:
        """Use these rollouts from now on. A rollout that cannot be reached is left out."""
        for address in [each for each in self._sessions if each not in rollouts]:
            await self._sessions.pop(address).close()
        self._costs = {address: self._costs[address] for address in self._sessions}
        new = [address for address in rollouts if address not in self._sessions]
        await asyncio.gather(*(self._open(address) for address in new))
        self._changed.set()
        self._changed = asyncio.Event()

    async def _open(self, to: PeerAddress) -> None:
        silence = self._config.deadlines.keepalive
        channel = Channel(to.address, self._keys, keys.process(to.name, to.incarnation), silence, to.token)
        session = Session(channel, to.name, "Rollout", to.machine)
        try:
            await session.open(silence)
        except ServiceFault as error:  # the coordinator finds this out as well
            log.warning("%s is not used: %s", to.name, error)
            await session.close()
        else:
            self._sessions[to], self._costs[to] = session, RolloutCost(to.slots)
            session.when_broken(lambda why: self._lose(to, session, why))

    def _lose(self, to: PeerAddress, session: Session, why: str) -> None:
        if self._sessions.get(to) is session:
            log.warning("%s (incarnation %d) is lost: %s", to.name, to.incarnation, why)
            del self._sessions[to]
            session.give_up(why)

    @property
    def count(self) -> int:
        return len(self._sessions)

    async def generate(self, request: GroupRequest, kept: str, least: PolicyVersion) -> tuple[list[Sample], str]:
        """Generate, see `runtime.gateway.calls.Rollouts`. Another rollout replaces one that is lost or older than `least`."""
        until = now() + self._config.deadlines.generate
        call = PlacedCall(len(request.prompt), request.n, beginnings(request.prompt))
        while True:
            to, session = await self._choose(call, kept, until)
            cost = self._costs[to]
            cost.begin(call, now())
            try:
                left = max(until - now(), timeouts.CALL_LEAST)
                done: GeneratedGroup = await session.call(GENERATE.name, request, left)
            except Unreachable:
                self._lose(to, session, "the connection is lost")
                continue
            finally:
                cost.end(call)
            if done.oldest < least:
                self._lose(to, session, f"it has version {done.oldest}, but the run has version {least}")
                continue
            payload = types.decode(GroupPayload, done.payload)
            lengths = payload.lengths.tolist()
            taken = [None] * len(lengths) if payload.experts is None else payload.experts.by_row(lengths)
            samples = payload.samples
            if done.newest > self._version:  # no engine continues keys and values of other weights
                self._version = done.newest
                for each in self._costs.values():
                    each.texts.clear()
            if done.load is not None:
                cost.observe(call, done.load, now())
                for each in self._costs.values():
                    each.guess(cost)
                for sample in samples if done.oldest == self._version else ():  # older texts have a former version's salt
                    cost.keep(beginnings(np.concatenate([request.prompt, sample.tokens])))
            pairs = zip(samples, taken, strict=True)
            return [replace(own(sample), experts=experts) for sample, experts in pairs], to.name

    async def _choose(self, call: PlacedCall, kept: str, until: float) -> tuple[PeerAddress, Session]:
        """Return the rollout where the call costs least. Raises Unreachable without any for `deadlines.keepalive`."""
        until = min(until, now() + self._config.deadlines.keepalive)
        while not self._sessions:
            if not await done_within(self._changed.wait(), until - now()):
                raise Unreachable("rollout", "Generate", "no rollout that the coordinator named can be reached")
        to = cheapest({each: self._costs[each] for each in self._sessions}, call, now(), kept)
        return to, self._sessions[to]

    async def close(self) -> None:
        for session in self._sessions.values():
            await session.close()


def own(sample: Sample) -> Sample:
    """Return a copy of the sample. Its arrays are views into a message with the whole prompt, which they keep in memory."""
    return replace(sample, tokens=sample.tokens.copy(), logprobs=sample.logprobs.copy())


class LoopLag:
    """Delay of the event loop: seconds that timers came late, of the newest `LAGS` timers."""

    def __init__(self) -> None:
        self._lags: deque[float] = deque([0.0], LAGS)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + timeouts.LOOP_LOOK
            await asyncio.sleep(timeouts.LOOP_LOOK)
            self._lags.append(max(0.0, loop.time() - due))

    def quantile(self, share: float) -> float:
        return float(np.quantile(self._lags, share))


class GatewayService(process.Service):
    """Answers `RunEpisodes` once the episodes of a group have ended, and HTTP calls of agents at any time."""

    role = "gateway"

    def __init__(self, config: Config, name: str, rank: int):
        super().__init__(config, name, rank)
        assert config.gateway is not None
        self._settings = config.gateway
        self._lag = LoopLag()
        self._watching: asyncio.Task[None] | None = None
        self._server: HttpServer | None = None
        self._rollouts: RolloutSessions
        self._calls: PolicyCalls
        self._episodes: Episodes
        self._environments: EnvironmentChannels
        self._players: EpisodeRunner
        self._keeper: BlobKeeper
        self.url = ""

    def load(self) -> None:
        self._renderer = renderer_of(Tokenizer.of(self.config), self._settings.tool_format, self.config.model.path)

    async def start(self) -> None:
        """Listen, and reach the environments. Raises UserError if the port is taken or an environment's server is silent."""
        config, sampling = self.config, self.config.sampling
        self._rollouts = RolloutSessions(config, self.keys)
        self._calls = PolicyCalls(
            model=Path(config.model.path).name,
            renderer=self._renderer,
            rollouts=self._rollouts.generate,
            context=self._settings.context or longest_text(config),
            run=None
            if self._settings.serve
            else SamplingParams(max_new_tokens=sampling.max_new_tokens, temperature=sampling.temperature, **sampling.filters),
        )
        self._episodes = Episodes(config, self.name, self._renderer, self._calls.answer)
        self._episodes.key = "" if self.keys is None else secrets.token_hex()  # until the coordinator sends it
        await self._listen()
        self._watching = asyncio.create_task(self._lag.run())
        self._environments = EnvironmentChannels(config, self.keys)
        await self._environments.check()
        self._players = EpisodeRunner(config, self.url, self._episodes)
        self._keeper = BlobKeeper(config, self.blobs)
        self._players.use(self._environments.by_name())
        self._episodes.players = self._players.play

    async def _listen(self) -> None:
        host, port = self.config.network.interface, self.config.services.gateway.port
        if port:
            port += int(self.name.rpartition("-")[2])
        most, tls = self._settings.episodes, self._tls()
        try:
            listener = network.listener(host, port, most)
        except OSError as error:
            why = os.strerror(error.errno or 0)
            raise UserError(f"services.gateway.port: cannot listen on {network.host_port(host, port)}: {why}") from None
        self._server = server(self._episodes, most=most)
        self.url = await self._server.open(listener, tls, most)
        folder = Path(self.config.run.dir) / run_files.GATEWAYS
        folder.mkdir(parents=True, exist_ok=True)
        (folder / self.name).write_text(self.url, encoding="utf-8")
        log.info("%s listens for agents on %s", self.name, self.url)

    def _tls(self) -> ssl.SSLContext | None:
        """Return the run's certificates, None without TLS. Clients trust them by the file `GATEWAYS_CA` in the run's folder."""
        if self.keys is None or not keys.https(self.config.network):
            return None
        context, pem = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), self.keys.pem()
        with os.fdopen(os.memfd_create("certificate"), "wb", buffering=0) as file:  # load_cert_chain reads only files
            file.write(pem.key + pem.own)
            context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
        (Path(self.config.run.dir) / run_files.GATEWAYS_CA).write_bytes(pem.ca)
        return context

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)  # the cancelled measurement
        if hasattr(self, "_episodes"):
            self._episodes.close()
            self._calls.close()  # calls end before the sessions and channels that they use
            await self._rollouts.close()
            await self._environments.close()
        if self._server is not None:
            await self._server.close()  # last: connections end once their calls have ended

    async def run_episodes(self, request: RunEpisodesRequest) -> GeneratedGroup:
        return await self._keeper.kept(await self._episodes.play(request))

    async def update_endpoints(self, command: UpdateEndpoints) -> None:
        if command.key or self.keys is None:
            self._episodes.key = command.key
        await self._rollouts.use(command.rollouts)
        left = self._environments.use(command.environments)
        self._players.use(self._environments.by_name())
        for channel in left:
            await channel.close()

    async def finish_group(self, command: FinishGroup) -> None:
        self._players.finish_group(command.group_id)

    def gauges(self) -> dict[str, float]:
        episodes, counts = self._episodes, self._episodes.counts
        return {
            "episodes": episodes.open,
            "waiting": episodes.waiting,
            "calls": counts["under_way"],
            "calls_total": counts["calls"],
            "episodes_total": counts["episodes"],
            "forks_total": episodes.forks.total(),
            **{f"forks_{reason.replace(' ', '_')}": number for reason, number in episodes.forks.items()},
            "played_again": counts["played_again"],
            "left_out": self._players.counts["left_out"],
            "failures": self._players.counts["failures"],
            "overridden_total": self._calls.counts["overridden"],
            "malformed_calls_total": self._calls.counts["malformed_calls"],
            "rollouts": self._rollouts.count,
            "loop_lag_p50": self._lag.quantile(0.5),
            "loop_lag_p99": self._lag.quantile(0.99),
            "loop_lag_max": self._lag.quantile(1.0),
            **{name: number for name, number in counts.items() if name.startswith(("ended_", "refused_"))},
        }


def be_responsive() -> None:
    """Keep the event loop's pauses short: to collect the objects of a thousand calls takes 50 ms, and frees nothing."""
    gc.set_threshold(YOUNG, 20, 20)
    sys.setswitchinterval(timeouts.LOOP_TURN)


if __name__ == "__main__":
    be_responsive()
    process.main(GatewayService)
