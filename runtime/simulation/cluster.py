"""The processes of a simulated run: starts, ends and replaces them, in place of the nodes' agents."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from runtime import commands, timeouts, types
from runtime.cluster.placement import RestartBackoff
from runtime.cluster.topology import Instance, instances, rollout_parallel, settings_of, slots
from runtime.commands import HANDED_OVER, InitWeightGroup, ResendWeights, SendWeights, WeightGroupReady, WeightsSent
from runtime.config import Config
from runtime.coordinator.metrics_recorder import RunSupervisor
from runtime.coordinator.register import Register, UnitChange, UnitState
from runtime.coordinator.weight_sync import seen
from runtime.errors import BlobLost, InvariantViolated, ServiceFault, SluiceError, Unanswered, Unreachable
from runtime.process.waiting import done_within
from runtime.simulation.engine import (
    STATE,
    Cores,
    Costs,
    HostMemory,
    ModelState,
    SimulatedAgents,
    SimulatedEngine,
    Stamp,
    _samples,
    sync_seconds,
)
from runtime.simulation.loop import SimulatedLoop
from runtime.status import Progress, Status
from runtime.types import GeneratedGroup, GroupPayload, GroupRequest, LogprobRequest, PolicyVersion, ScoreRequest, ValueRequest
from runtime.weights.plan import GroupAddress, Manifest

# ---- Process
# A simulated process of a role, as the coordinator sees it. A stopped process keeps its connection, and does nothing until it
# goes on. A process that ends breaks its connection; the coordinator sees that after the link's delay.
#
#     coordinator ── post ──► link (delay, in order) ──► handler named after the command ──► link ──► answer
#                      └── the command's deadline: Unanswered; of a group of ranks, its loss

_ASKED: dict[type, str] = {GroupRequest: "generate", ScoreRequest: "score", LogprobRequest: "logprobs", ValueRequest: "values"}
Versions = list[PolicyVersion]
Deadline = Callable[[Config, str, Any], float]  # from a role and a command to the seconds until the answer
BYTES = 8  # of a payload for each token: the token and its log-probability
_LEAST = 1e-9  # seconds between two messages of one link, to keep their order


class SimulatedProcess:
    """A RolePort. Subclasses handle a command in a method named after the command."""

    is_group = False  # whether ranks form one unit, which the first unanswered command or ping loses
    withdraws = False  # whether a cancelled call cancels its handler
    version = PolicyVersion()  # of the weights; a rollout begins with the initial ones

    def __init__(self, cluster: SimulatedCluster, name: str, incarnation: int, machine: str):
        self.name, self.incarnation, self.machine = name, incarnation, machine
        self.role = name.rpartition("-")[0]
        self.machines = {name: machine}
        self.cluster = cluster
        self.loop = cluster.loop
        self.cores = cluster.cores[machine]
        self.chance = random.Random(f"{cluster.seed}/{name}/{incarnation}")
        self.alive = True
        self.slow = 1.0  # factor on the delays of its link
        self._busy = 0.0
        self._lost = ""  # the reason why the coordinator lost the connection
        self._when_lost: list[Callable[[str], None]] = []
        self._calls: dict[asyncio.Future[Any], str] = {}  # under way, with their phases
        self._tasks: set[asyncio.Task[None]] = set()
        self._goes_on = asyncio.Event()
        self._goes_on.set()
        self._arrives = self._returns = 0.0  # times of the last message in each direction
        self._in_turn = asyncio.Lock()

    # ------------------------------------------------------------------------------------------ the port

    def post(self, command: Any) -> Coroutine[Any, Any, Any]:
        phase, answer = type(command).__name__, self.loop.create_future()
        answer.add_done_callback(seen)  # the caller may have ended
        self.loop.note(f"{self.name}.{self.incarnation} {phase}")
        if self._lost:
            answer.set_exception(Unreachable(self.name, phase, self._lost))
            return self._answered(answer, None, [])
        self._calls[answer] = phase
        seconds = self.cluster.deadline(self.cluster.config, self.role, command)
        timer = self.loop.call_later(seconds, self._expire, answer, seconds)
        carrying: list[asyncio.Task[None]] = []
        self._arrives = self._sent(self._arrives, lambda: carrying.append(self._take(command, answer)))
        return self._answered(answer, timer, carrying)

    async def call(self, command: Any) -> Any:
        return await self.post(command)

    def acknowledge(self, command: Any) -> None:
        """Do nothing: this process keeps no answers."""

    async def status(self) -> Status:
        """Return the engine's status. A stopped process does not answer."""
        if self._lost:
            raise Unreachable(self.name, "Status", self._lost)
        delay = self._delay()
        await asyncio.sleep(delay)  # beside the link of the calls, which it may overtake
        if not self._goes_on.is_set() or not self.alive:
            await asyncio.sleep(timeouts.CONTROL_CALL)
            raise Unanswered(self.name, "Status", "did not answer", timeouts.CONTROL_CALL)
        found = Status(role=self.role, name=self.name, version=self.version, gauges=self.gauges())
        await asyncio.sleep(delay)
        return found

    def when_lost(self, callback: Callable[[str], None]) -> None:
        if self._lost:
            callback(self._lost)
        else:
            self._when_lost.append(callback)

    def give_up(self, reason: str) -> None:
        self._when_lost.clear()
        self._lost = self._lost or reason
        calls, self._calls = self._calls, {}
        for answer, phase in calls.items():
            if not answer.done():
                answer.set_exception(Unreachable(self.name, phase, self._lost))

    def lose(self, reason: str) -> None:
        """Let the coordinator find the connection lost."""
        if not self._lost:
            callbacks = list(self._when_lost)
            self.give_up(reason)
            for callback in callbacks:
                callback(reason)

    # ------------------------------------------------------------------------------------------ faults

    def kill(self) -> None:
        if self.alive:
            self.alive = False
            for task in self._tasks:
                task.cancel()
            self.ended()
            self.loop.call_later(self._delay(), self.lose, "connection lost")

    def stop(self) -> None:
        """Stop the process as SIGSTOP does. A group of ranks is lost once it answers no ping."""
        if self._goes_on.is_set():
            self._goes_on.clear()
            self.cluster.observer.stopped(self)
            if self.is_group:
                silence = self.cluster.config.deadlines.keepalive
                self.loop.call_later(silence, self._pinged, silence)

    def go_on(self) -> None:
        self._goes_on.set()

    def cut(self) -> None:
        """Break the connection; the process lives on."""
        self.loop.call_later(self._delay(), self.lose, "connection reset")

    def ended(self) -> None:
        """Clean up more than tasks, in subclasses."""

    def gauges(self) -> dict[str, float]:
        return {"busy_seconds_total": self._busy}

    # ------------------------------------------------------------------------------------------ inside

    async def spend(self, seconds: float) -> float:
        """Compute for `seconds`, and wait while stopped. Returns the time that the computation took."""
        began = self.loop.time()
        await self.cores.spend(seconds)
        took = self.loop.time() - began
        self._busy += took
        await self._goes_on.wait()  # a stopped process continues after `go_on`
        return took

    async def in_turn(self, seconds: float) -> None:
        """Compute, one call at a time."""
        async with self._in_turn:
            await self.spend(seconds)

    async def onload(self, command: commands.Onload | commands.Offload) -> None:
        await self.in_turn(self.cluster.costs.swap)

    offload = onload

    def fault(self, phase: str, message: str, deadline: float | None = None) -> ServiceFault:
        return ServiceFault(self.name, phase, message, deadline)

    def _delay(self) -> float:
        return self.slow * self.cluster.costs.delay.draw(self.chance)

    def _sent(self, last: float, deliver: Callable[[], Any]) -> float:
        when = max(last + _LEAST, self.loop.time() + self._delay())
        self.loop.call_at(when, deliver)
        return when

    def _take(self, command: Any, answer: asyncio.Future[Any]) -> asyncio.Task[None]:
        task = self.loop.create_task(self._carry_out(command, answer))
        self._tasks.add(task)
        task.add_done_callback(self._carried)
        if not self.alive:
            task.cancel()
        return task

    def _carried(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.loop.fail(error)

    async def _carry_out(self, command: Any, answer: asyncio.Future[Any]) -> None:
        await self._goes_on.wait()
        name = _ASKED.get(type(command)) or types.snake(type(command).__name__)
        try:
            result = await getattr(self, name)(command)
            settle = partial(answer.set_result, result)
        except SluiceError as error:
            result, settle = None, partial(answer.set_exception, error)
        await self._goes_on.wait()

        def deliver() -> None:
            if not answer.done() and self.alive:
                settle()

        nbytes = BYTES * sum(result.response_tokens) if isinstance(result, GeneratedGroup) else 0
        self._returns = self._sent(self._returns, lambda: self.cluster.arrive(deliver, nbytes))

    async def _answered(
        self, answer: asyncio.Future[Any], timer: asyncio.Handle | None, carrying: list[asyncio.Task[None]]
    ) -> Any:
        try:
            return await answer
        except asyncio.CancelledError as cancelled:
            if self.withdraws and carrying and HANDED_OVER not in cancelled.args:
                self._sent(0.0, carrying[0].cancel)
            raise
        finally:
            self._calls.pop(answer, None)
            if timer is not None:
                timer.cancel()

    def _expire(self, answer: asyncio.Future[Any], seconds: float) -> None:
        if answer.done():
            return
        phase = self._calls[answer]
        if self.is_group:
            self.lose(f"{phase}: did not answer")
        else:
            answer.set_exception(Unanswered(self.name, phase, "did not answer", seconds))

    def _pinged(self, silence: float) -> None:
        if not self._goes_on.is_set():
            self.lose(f"no answer to pings for {silence:g} s")


# ---- Weights
# A weight sync: an epoch's members meet, a version travels, and each member's progress is recorded.


class SyncEpoch:
    """An epoch that fails for all members if one leaves or ends, as a collective does. Events count the awaited members."""

    def __init__(self, names: tuple[str, ...], seconds: Mapping[str, float]):
        """Make the epoch of the members `names`, the sender first. `seconds`: in which each receiver gets a version."""
        self.names, self.seconds = names, seconds
        self.broken = ""  # the reason, once the epoch is broken
        self.bad: set[PolicyVersion] = set()
        """Versions with a wrong byte for all receivers."""
        self.verified: dict[PolicyVersion, set[str]] = {}
        self._received: dict[PolicyVersion, set[str]] = {}
        self._here: set[str] = set()
        self._reached: set[Any] = set()
        self._events: dict[Any, asyncio.Event] = {}  # set when reached, or when the epoch is broken

    async def meet(self, process: SimulatedProcess) -> None:
        """Wait for all members. Raises ServiceFault if a member is late, or the epoch is broken."""
        self._here.add(process.name)
        if len(self._here) == len(self.names):
            self._reach("met")
        await self._until(process, "join", process.cluster.config.weight_sync.join_timeout, "met")

    async def send(self, process: SimulatedProcess, version: PolicyVersion) -> None:
        """Send a version, and wait until every receiver has every byte. Forgets versions before the last."""
        for old in sorted(self.verified)[:-1]:
            del self.verified[old], self._received[old]
        self._reach(("sent", version))
        await self._until(process, "transfer", process.cluster.config.weight_sync.transfer_timeout, ("received", version))

    async def receive(self, process: SimulatedProcess, version: PolicyVersion, seconds: float, timeout: float) -> None:
        """Receive a version's bytes in `seconds`, then verify their checksums in a tenth of that. Raises ServiceFault."""
        # The sender's `send` unblocks this; a member that leaves breaks the epoch and ends it.
        await self._until(process, "announce", timeout, ("sent", version))
        # The bytes travel; the last receiver's arrival unblocks the sender.
        await process.spend(seconds)
        if self.broken:
            raise process.fault("transfer", self.broken)
        received = self._received.setdefault(version, set())
        received.add(process.name)
        if len(received) == len(self.names) - 1:
            self._reach(("received", version))
        await process.spend(seconds / 10)
        if process.name in process.cluster.corrupt or version in self.bad:
            process.cluster.corrupt.discard(process.name)
            self.leave(process.name, "left after a checksum that does not match")
            raise process.fault("verify", f"version {version}: the checksum does not match")
        self.verified.setdefault(version, set()).add(process.name)

    def leave(self, name: str, reason: str = "left") -> None:
        if name in self.names:
            self.broken = self.broken or f"{name} {reason}"
            for event in self._events.values():
                event.set()

    def _reach(self, what: Any) -> None:
        self._reached.add(what)
        self._event(what).set()

    def _event(self, what: Any) -> asyncio.Event:
        event = self._events.setdefault(what, asyncio.Event())
        if self.broken:
            event.set()
        return event

    async def _until(self, process: SimulatedProcess, phase: str, timeout: float, what: Any) -> None:
        if not await done_within(self._event(what).wait(), timeout):
            self.leave(process.name, "has timed out")
            raise process.fault(phase, "others did not come", timeout)
        if what not in self._reached:
            raise process.fault(phase, self.broken)
        await process.spend(0.0)


class SyncMember(SimulatedProcess):
    """A member of epochs, which may send."""

    async def init_weight_group(self, command: InitWeightGroup) -> WeightGroupReady:
        """Open an epoch with this process as its sender."""
        cluster, names = self.cluster, (self.name, *command.names)
        senders = cluster.config.services.trainer.processes if self.is_group else 1
        machines = (*command.machines[:1] * senders, *command.machines[1:])
        workers, bucket_bytes = rollout_parallel(cluster.config).devices_each, cluster.config.weight_sync.bucket_bytes
        took = sync_seconds(cluster.costs, machines, senders, bucket_bytes, workers)
        epoch = cluster.epochs[command.epoch] = SyncEpoch(names, dict(zip(command.names, took, strict=True)))
        self._tasks.add(self.loop.create_task(self._meet(epoch)))
        address = GroupAddress(
            epoch=command.epoch,
            world_size=len(epoch.names),
            backend="gloo",
            timeout=cluster.config.weight_sync.join_timeout,
            host=self.machine,
            port=1,
            names=epoch.names,
        )
        return WeightGroupReady(address, Manifest(tensors=(), bucket_bytes=1))

    async def _meet(self, epoch: SyncEpoch) -> None:
        """Connect a sender beside its commands, and ignore a failure: the next transfer reports it."""
        with suppress(SluiceError):
            await epoch.meet(self)

    async def send(self, command: SendWeights | ResendWeights, intact: bool = True) -> WeightsSent:
        """Send this process's version, `intact` or not. Raises ServiceFault."""
        epoch = self.cluster.epochs.get(command.epoch)
        if epoch is None:
            raise self.fault("transfer", f"there is no sync group of epoch {command.epoch}")
        began = self.loop.time()
        # Every member's `meet` unblocks this.
        await epoch.meet(self)
        if not intact:
            epoch.bad.add(command.version)
        # The last receiver's bytes unblock this.
        await epoch.send(self, command.version)
        return WeightsSent(round(self.cluster.costs.weights_bytes), self.loop.time() - began)

    async def abort_weights(self, command: commands.AbortWeights) -> None:
        if (epoch := self.cluster.epochs.get(command.epoch)) is not None:
            epoch.leave(self.name)

    def ended(self) -> None:
        for epoch in self.cluster.epochs.values():
            epoch.leave(self.name, "is gone")


# ---- Roles
# Handlers of commands by role, with their times. A group's payload has only its id and versions, as the checks need them. Only
# evaluations read replies, so their payloads are whole.


class SimulatedRollout(SyncMember):
    withdraws = True

    def __init__(self, cluster: SimulatedCluster, name: str, incarnation: int, machine: str):
        super().__init__(cluster, name, incarnation, machine)
        self.received: PolicyVersion | None = None
        self._groups: dict[tuple[int, int], asyncio.Task[GeneratedGroup]] = {}  # asked for, until acknowledged
        self.asleep = False
        self.engine = SimulatedEngine(cluster.loop, cluster.costs, cluster.slots[name], self.cores)

    async def generate(self, request: GroupRequest) -> GeneratedGroup:
        """Generate a group, or go on with it if it was asked for before."""
        if request.purpose != "train":
            return await self._generate(request)
        key = request.group_id, request.attempt
        if key not in self._groups:
            self.cluster.observer.generates(self, request)
            self._groups[key] = self.loop.create_task(self._generate(request))
        try:
            return await asyncio.shield(self._groups[key])
        except asyncio.CancelledError:
            if (group := self._groups.pop(key, None)) is not None:
                group.cancel()
            raise

    def acknowledge(self, command: Any) -> None:
        self._groups.pop((command.group_id, command.attempt), None)

    async def _generate(self, request: GroupRequest) -> GeneratedGroup:
        if request.purpose == "probe":
            await self.spend(self.cluster.costs.decode_step * request.sampling.max_new_tokens)
            versions = [self.version] * request.n
            return self._answer(request, [1] * request.n, versions, versions)
        chance = random.Random(request.seed * 31 + request.first)
        limit, owner = request.sampling.max_new_tokens, object()
        lengths = self.cluster.costs.lengths(chance, request.n, limit)
        oldest, newest = ([self.version] * request.n for _ in range(2))
        left, ended = set(range(request.n)), self.loop.create_future()

        def begun(index: int) -> None:
            oldest[index] = self.version

        def done(index: int) -> None:
            newest[index] = self.version
            left.discard(index)
            if not left and not ended.done():
                ended.set_result(None)

        for index, tokens in enumerate(lengths):
            self.engine.submit(owner, len(request.prompt), tokens, partial(begun, index), partial(done, index))
        try:
            await ended
        finally:
            if left:
                self.engine.withdraw(owner)
        return self._answer(request, lengths, oldest, newest)

    def _answer(self, request: GroupRequest, lengths: list[int], oldest: Versions, newest: Versions) -> GeneratedGroup:
        old, new = min(oldest), max(newest)
        holders = [] if request.purpose == "eval" else self.cluster.agents.holders(self.machine)
        if request.purpose == "eval":
            payload = types.encode(GroupPayload.of(request.group_id, request.prompt, _samples(lengths, oldest)))
        else:
            tokens = len(request.prompt) * request.n + sum(lengths)
            payload = msgspec.msgpack.encode(Stamp(request.group_id, old.pack(), new.pack(), tokens, holders))
        return GeneratedGroup(
            group_id=request.group_id,
            prompt_tokens=len(request.prompt),
            response_tokens=lengths,
            truncated=sum(length == request.sampling.max_new_tokens for length in lengths),
            oldest=old,
            newest=new,
            holders=holders,
            payload=payload,
        )

    async def resend_weights(self, command: ResendWeights) -> WeightsSent:
        if self.version != command.version:
            raise self.fault("snapshot", f"version {command.version} is not here, but {self.version}")
        return await self.send(command)

    async def join_weights(self, command: commands.JoinWeights) -> None:
        await self.cluster.epochs[command.address.epoch].meet(self)

    async def receive_weights(self, command: commands.ReceiveWeights) -> commands.WeightsReceived:
        config, epoch = self.cluster.config, self.cluster.epochs[command.epoch]
        self.received = None
        patience = config.deadlines.train + 2 * config.weight_sync.transfer_timeout
        await epoch.receive(self, command.version, self.slow * epoch.seconds[self.name], patience)
        self.received = command.version
        return commands.WeightsReceived()

    async def commit_weights(self, command: commands.CommitWeights) -> commands.WeightsCommitted:
        if self.received != command.version:
            raise self.fault("commit", f"version {command.version} is not here, but {self.received}")
        if self.cluster.config.weight_sync.in_flight == "drain":
            await self.engine.drained()
        self.engine.pause()
        await self.spend(self.cluster.costs.swap)
        self.cluster.observer.swapped(self, command.version, self.cluster.epochs[command.epoch])
        self.version = command.version
        self.engine.go_on()
        return commands.WeightsCommitted(self.cluster.costs.swap)

    async def abort_weights(self, command: commands.AbortWeights) -> None:
        await super().abort_weights(command)
        self.received = None

    async def set_level(self, command: commands.SetLevel) -> None:
        if (asleep := command.level < commands.Level.AWAKE) != self.asleep:
            self.asleep = asleep
            (self.engine.pause if asleep else self.engine.wake)()
        await self.spend(self.cluster.costs.swap)

    def ended(self) -> None:
        self.engine.pause()
        super().ended()

    def stop(self) -> None:
        if self._goes_on.is_set():
            self.engine.pause()
        super().stop()

    def go_on(self) -> None:
        if not self._goes_on.is_set():
            self.engine.go_on()
        super().go_on()

    def gauges(self) -> dict[str, float]:
        # Each slot has its own room for keys and values, and its use is not modelled.
        return self.engine.gauges() | dict.fromkeys(("kv_use", "kv_shared", "preemptions_total"), 0.0)


class SimulatedReward(SimulatedProcess):
    """types.Scores each reply right or wrong at random, with the same result each time."""

    def __init__(self, cluster: SimulatedCluster, name: str, incarnation: int, machine: str):
        super().__init__(cluster, name, incarnation, machine)
        self._workers = asyncio.Semaphore(cluster.config.rewards.workers or 1)

    async def score(self, request: ScoreRequest) -> types.Scores:
        chance = random.Random(request.group_id)
        size = types.decode(GroupPayload, request.payload).n if request.answers else self.cluster.config.sampling.group_size
        async with self._workers:
            await self.spend(self.cluster.costs.score.draw(self.chance))
        values = np.array([float(chance.random() < 0.5) for _ in range(size)], np.float32)
        answers: list[str | None] = [request.label] * size if request.answers else []
        valid, rules = np.ones(size, np.uint8), {self.cluster.judge: values}
        return types.Scores(group_id=request.group_id, rewards=values, valid=valid, rules=rules, answers=answers)


class SimulatedReference(SimulatedProcess):
    async def logprobs(self, request: LogprobRequest) -> bytes:
        self.cluster.agents.require(self.name, request.payload)
        await self.in_turn(self.cluster.costs.reference_token * msgspec.msgpack.decode(request.payload, type=Stamp).tokens)
        return request.payload


class SimulatedModel(SimulatedProcess):
    """A model under training. Its ranks are one unit, and execute data commands in order."""

    is_group = True

    def __init__(self, cluster: SimulatedCluster, name: str, incarnation: int, machine: str):
        super().__init__(cluster, name, incarnation, machine)
        self.state, self._computed = ModelState(), 0.0
        self._batch: list[types.TrainGroup] = []
        self._result = types.StepResult(metrics={}, seconds=0.0)  # of the newest step
        self._kept_in = 0.0  # seconds, for the metrics of the next step
        self._recalled: PolicyVersion | None = None
        self._keeping: PolicyVersion | None = None  # copies that are not complete
        self._ordered = 0  # the version that the newest Apply makes
        self._from = 0  # the commands of all steps before are not sent again

    def post(self, command: Any) -> Coroutine[Any, Any, Any]:
        if isinstance(command, commands.BeginStep | commands.Accumulate) and command.step < self._from:
            return asyncio.sleep(0.0)
        return super().post(command)

    async def take_up(self) -> int:
        """Go on after an earlier attempt: see the client's."""
        self._from = int((await self.status()).gauges["ordered"])
        return self._from

    def gauges(self) -> dict[str, float]:
        return super().gauges() | {"ordered": max(self._ordered, self.state.step)}

    async def restore(self, command: commands.Restore) -> None:
        folder = Path(command.folder)
        path = (folder / "critic" if self.role == "critic" else folder) / STATE
        self.state = msgspec.json.decode(path.read_bytes(), type=ModelState)
        await self.in_turn(self.cluster.costs.save)

    async def values(self, request: ValueRequest) -> bytes:
        await self.in_turn(self.cluster.costs.reference_token * request.tokens)
        return request.payload

    async def begin_step(self, command: commands.BeginStep) -> None:
        async with self._in_turn:
            await self.spend(0.0)
            self._batch, self._computed = [], 0.0

    async def accumulate(self, command: commands.Accumulate) -> None:
        async with self._in_turn:
            self._computed += await self.spend(self.cluster.costs.train_token * sum(group.tokens for group in command.groups))
            try:
                self.cluster.agents.require(self.name, *(group.payload for group in command.groups))
            except BlobLost:  # a rank ends at once: others wait for it
                self.cluster.kill(self)
                raise
            self._batch += command.groups

    async def apply(self, command: commands.Apply) -> types.StepResult:
        """Make the step, or return its result if it was made before."""
        self._ordered = command.step + 1
        async with self._in_turn:
            if command.step < self.state.step:
                return self._result
            self._computed += await self.spend(self.cluster.costs.update)
            batch, self._batch = self._batch, []
            self.cluster.observer.applied(self, command.step, batch)
            self.state = ModelState(command.step + 1, [*self.state.trained, *(group.group_id for group in batch)])
            newest = [msgspec.msgpack.decode(probe, type=Stamp).newest & 0xFFFFFFFF for probe in command.probes]
            metrics = {f"timing/{'' if self.role == 'trainer' else 'critic_'}keep": self._kept_in} if self._kept_in else {}
            gaps = [float(step != command.step) for step in newest]
            self._result = types.StepResult(metrics=metrics, seconds=self._computed, probes=gaps)
            return self._result

    async def keep(self, command: commands.Keep) -> None:
        """Copy the state while later commands wait; then complete the copies, which takes as long, beside these."""
        async with self._in_turn:
            if command.version == self._recalled:
                return
            if self._keeping is not None:
                raise InvariantViolated(f"the copies of version {self._keeping} are not complete")
            self._keeping, state, result = command.version, self.state, self._result
            self._kept_in = await self.spend(self.cluster.costs.keep)
        await self.cores.spend(self.cluster.costs.keep)
        await self._goes_on.wait()
        self.cluster.memory.keep(self.name, command.version, state, result)
        self.cluster.observer.kept(self, command.version)
        self._keeping = None

    async def recall(self, command: commands.Recall) -> commands.Recalled:
        async with self._in_turn:
            found = self.cluster.memory.newest(self.name, command.version)
            if found is None:
                return commands.Recalled(None, "no copy is left")
            await self.spend(self.cluster.costs.keep)
            self._recalled, self.state, self._result = found
            return commands.Recalled(self._recalled, "")

    async def save(self, command: commands.Save) -> list[str]:
        async with self._in_turn:
            await self.spend(self.cluster.costs.save)
            try:
                (Path(command.folder) / STATE).write_bytes(msgspec.json.encode(self.state))
            except OSError as error:
                raise self.fault("save", str(error)) from error
        return []


class SimulatedTrainer(SimulatedModel, SyncMember):
    _held: PolicyVersion | None = None  # the last gathered version
    _intact = True  # whether it is unchanged since

    async def send_weights(self, command: SendWeights) -> WeightsSent:
        async with self._in_turn:  # gather after the commands before
            await self.spend(self.cluster.costs.swap)
            self._held = command.version
            self._intact = self.name not in self.cluster.corrupt
            self.cluster.corrupt.discard(self.name)
        return await self.send(command, self._intact)

    async def resend_weights(self, command: ResendWeights) -> WeightsSent:
        if self._held != command.version or not self._intact:
            raise self.fault("snapshot", f"version {command.version} was not kept: {self._held} is there")
        return await self.send(command, self._intact)

    async def export(self, command: commands.Export) -> None:
        await self.in_turn(self.cluster.costs.save)


ROLES: dict[str, type[SimulatedProcess]] = dict.fromkeys(types.SCORERS, SimulatedReward)
ROLES |= {"rollout": SimulatedRollout, "reference": SimulatedReference, "trainer": SimulatedTrainer, "critic": SimulatedModel}


class SimulatedCluster(RunSupervisor):
    """All processes of the run, connected in `register` from the start. Also the run's supervisor."""

    def __init__(
        self, loop: SimulatedLoop, config: Config, costs: Costs, seed: str, deadline: Deadline, observer: Observer, nodes: int
    ):
        self.loop, self.config, self.costs, self.seed = loop, config, costs, seed
        self.deadline, self.observer = deadline, observer
        super().__init__(Register(), Progress())
        self.register = self._register
        self.processes: dict[str, SimulatedProcess] = {}
        self.epochs: dict[int, SyncEpoch] = {}
        self.memory, self.agents = HostMemory(), SimulatedAgents(config, nodes)
        self._restarted: dict[str, int] = {}  # the run's step when a model under training was started again last
        self.corrupt: set[str] = set()
        """The rollouts whose next version arrives with a wrong byte; the trainer, if its next version has a wrong byte."""
        self.failed: asyncio.Future[None] = loop.create_future()
        """Fails if the run must end: a necessary process is not started again."""
        self.judge = config.rewards.rules[0].name.rpartition(":")[2] if config.rewards.rules else "reward"
        self.slots, self._chance = slots(config), random.Random(f"{seed}/cluster")
        self._allowances: dict[str, RestartBackoff] = {}
        self._nodes: dict[str, str] = {}
        self.cores = {f"node-{number}": Cores(loop, costs.cores) for number in range(nodes)}
        self.coordinator_busy = 0.0  # seconds
        self._thread = asyncio.Lock()  # of the coordinator
        units = [unit for unit in instances(config) if unit.rank == 0]
        for number, unit in enumerate(units):
            self._nodes[unit.name] = f"node-{number % nodes}"
            self._allowances[unit.name] = RestartBackoff(settings_of(config, unit).restarts)
            self._spawn(unit, 0)
        self.register.subscribe(self._look)

    def report(self, progress: Progress) -> None:
        self.observer.published = self.observer.published or progress.phase not in ("starting", "recovering")
        self.loop.note(f"{progress.phase} {progress.step}")
        self.agents.step = progress.step

    def vacated(self) -> None:
        """Do nothing: simulated processes hold no memory."""

    def arrive(self, deliver: Callable[[], None], nbytes: int = 0) -> None:
        """Deliver an answer with a payload of `nbytes` to the coordinator. Its one thread handles one answer at a time."""
        seconds = self.costs.coordinator_message + nbytes * self.costs.coordinator_byte
        if seconds:
            self.loop.create_task(self._handle(seconds, deliver))
        else:
            deliver()

    async def _handle(self, seconds: float, deliver: Callable[[], None]) -> None:
        async with self._thread:
            began = self.loop.time()
            await self.cores["node-0"].spend(seconds)
            self.coordinator_busy += self.loop.time() - began
            deliver()

    def kill(self, process: SimulatedProcess) -> None:
        """End a process. Its node starts another incarnation if restarts allow it."""
        if not process.alive:
            return
        process.kill()
        delay, start = self._delay(process), self.costs.start.draw(self._chance)
        if delay is not None:
            if isinstance(process, SimulatedModel) and getattr(self.config.services, process.role).standby:
                start *= self.costs.forked
            self.loop.call_later(delay + start, self._spawn, Instance(process.role, process.name), process.incarnation + 1)
        elif process.is_group or not self.register.has_others(process):
            self.loop.call_later(self.costs.delay.draw(self._chance), self._fail, process.name)

    def lose_node(self, node: str) -> None:
        """End all processes of a node, and lose its memory."""
        self.agents.lose(node)
        for process in [one for one in self.processes.values() if one.machine == node]:
            self.memory.lose(process.name)
            self.kill(process)

    def _delay(self, process: SimulatedProcess) -> float | None:
        """Return the seconds until a process is started again, None for never: see `Nodes.start_again`."""
        if isinstance(process, SimulatedModel) and getattr(self.config.services, process.role).restarts:
            before, self._restarted[process.name] = self._restarted.get(process.name, -1), self._progress.step
            if self._progress.step > before and self.config.checkpoint.in_memory != "off":
                return 0.0
        return self._allowances[process.name].delay(self.loop.time())

    def _spawn(self, unit: Instance, incarnation: int) -> None:
        process = self.processes[unit.name] = ROLES[unit.role](self, unit.name, incarnation, self._nodes[unit.name])
        self.register.add(unit.role, process)

    def _fail(self, name: str) -> None:
        if not self.failed.done():
            self.failed.set_exception(SluiceError(f"{name}: is not started again"))

    def _look(self, change: UnitChange) -> None:
        """End a process that the coordinator lists as lost: its node learns of the loss from the coordinator."""
        unit = change.unit
        process = self.processes.get(unit.name)
        if unit.state is UnitState.LOST and process is not None and process.incarnation == unit.incarnation and process.alive:
            self.loop.call_later(self.costs.delay.draw(self._chance), self.kill, process)


class Observer:
    """An observer of the processes. This base class checks nothing."""

    published = False  # whether the first version of this life of the coordinator counts

    def applied(self, model: SimulatedModel, step: int, batch: Sequence[types.TrainGroup]) -> None:
        """Observe an update of a model."""

    def kept(self, model: SimulatedModel, version: PolicyVersion) -> None:
        """Observe that the copies of a version in memory are complete."""

    def generates(self, rollout: SimulatedRollout, request: GroupRequest) -> None:
        """Observe that a rollout begins to generate a group."""

    def swapped(self, rollout: SimulatedRollout, version: PolicyVersion, epoch: SyncEpoch) -> None:
        """Observe a rollout's swap to a version."""

    def stopped(self, process: SimulatedProcess) -> None:
        """Observe that a process was stopped; its connection stays."""
