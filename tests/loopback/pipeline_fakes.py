"""Roles in memory, for the pipeline's real logic: they take time, and fail, as they are told; and what holds of every run."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import numpy as np
import pytest
from msgspec.structs import replace

from runtime import config, run_files, types
from runtime.commands import Level, WeightGroupReady, WeightsCommitted, WeightsReceived, WeightsSent
from runtime.config import Config
from runtime.coordinator.metrics_recorder import COUNTED, RunContext, RunHistory, RunSupervisor
from runtime.coordinator.register import Register, UnitChange, UnitState
from runtime.coordinator.run import TrainingRun
from runtime.data.handlers import Problem
from runtime.data.prepared import Prompts
from runtime.data.prompts import PromptStream
from runtime.errors import ServiceFault
from runtime.evaluation.results import HeldOut, evaluation_sets
from runtime.ledger import checkpoint
from runtime.ledger.checkpoint import Position
from runtime.ledger.journal import LedgerWriter
from runtime.ledger.reader import GroupRow, LedgerReader
from runtime.ledger.states import Phase
from runtime.process.waiting import first_error
from runtime.status import Loss, Progress, Status
from runtime.telemetry.record import read_jsonl
from runtime.telemetry.summary import Summary
from runtime.telemetry.trackers import Trackers
from runtime.types import (
    GeneratedGroup,
    GroupPayload,
    GroupRequest,
    Holder,
    LogprobRequest,
    PolicyVersion,
    Sample,
    ScoreRequest,
    Scores,
    StepResult,
    TrainGroup,
    ValueRequest,
)
from runtime.weights.plan import GroupAddress, Manifest
from tests.loopback.losable import Losable
from tests.loopback.weight_cases import until as until

T = TypeVar("T")
P = TypeVar("P", bound=Losable)

DEADLINE = 100.0  # seconds that one run may take
BYTES = 4096  # of one weight sync
GATHERED = 0.75  # seconds
MANIFEST = Manifest(tensors=(), bucket_bytes=1)
STATE = "state"  # what a model leaves in a checkpoint


async def no_wait() -> None:
    """What takes no time."""


def no_time() -> float:
    return 0.0


class Weights:
    """What the trainer has broadcast: receivers wait here for a version."""

    def __init__(self) -> None:
        self._sent: dict[PolicyVersion, asyncio.Event] = {}

    def of(self, version: PolicyVersion) -> asyncio.Event:
        return self._sent.setdefault(version, asyncio.Event())


class FakeModel(Losable):
    """A model under training: carries out commands one after the other, in the order in which they were posted.

    `posted` and `done` are those orders; `done_when_posted[i]` is what was done when command i was posted.
    """

    def __init__(self, apply_seconds: Callable[[], float] = no_time, incarnation: int = 0):
        super().__init__(incarnation)
        self.restored = ""
        self.posted: list[tuple[str, int]] = []
        self.done: list[tuple[str, int]] = []
        self.done_when_posted: list[frozenset[tuple[str, int]]] = []
        self.batches: dict[int, list[TrainGroup]] = {}
        self.events: dict[tuple[str, int], asyncio.Event] = {}
        """Each is set once its command is posted."""
        self.parts: list[str] = []
        """What ranks speak for, where nodes share no folder."""
        self.places: list[tuple[bytes, tuple[int, ...]]] = []
        self._apply_seconds = apply_seconds
        self._last: asyncio.Task[Any] | None = None

    def restore(self, folder: str, place: bytes, incarnation: int) -> Coroutine[Any, Any, None]:
        assert not self.posted  # it is the first command
        self.restored, self.places = folder, [(place, (incarnation,))]
        return self.reached(no_wait())

    def begin_step(self, step: int) -> Coroutine[Any, Any, None]:
        return self._post("begin", step, no_wait)

    def accumulate(self, step: int, groups: list[TrainGroup], last: bool) -> Coroutine[Any, Any, None]:
        self.batches.setdefault(step, []).extend(groups)
        return self._post("accumulate", step, no_wait)

    def apply(self, step: int, probes: Sequence[bytes] = ()) -> Coroutine[Any, Any, StepResult]:
        return self._post("apply", step, lambda: self.applied(step))

    def save(self, folder: str, place: bytes, keep: tuple[int, ...]) -> Coroutine[Any, Any, list[str]]:
        self.places.append((place, keep))
        return self._post("save", checkpoint_step(folder), lambda: self.write(Path(folder)))

    def onload(self) -> Coroutine[Any, Any, None]:
        return self._post("onload", 0, no_wait)

    def offload(self) -> Coroutine[Any, Any, None]:
        return self._post("offload", 0, no_wait)

    async def applied(self, step: int) -> StepResult:
        seconds = self._apply_seconds()
        await asyncio.sleep(seconds)
        return StepResult(metrics=self.metrics(), seconds=seconds)

    def metrics(self) -> dict[str, float]:
        return {"actor/grad_norm": 1.0}

    async def write(self, folder: Path) -> list[str]:
        leave_state(folder, self.name)
        return self.parts

    def _post(self, name: str, step: int, work: Callable[[], Awaitable[T]]) -> Coroutine[Any, Any, T]:
        command, previous = (name, step), self._last
        self.posted.append(command)
        self.done_when_posted.append(frozenset(self.done))
        if command in self.events:
            self.events[command].set()

        async def in_turn() -> T:
            if previous is not None:
                await asyncio.wait({previous})
            value = await work()
            self.done.append(command)
            return value

        task = self._last = asyncio.ensure_future(in_turn())
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # whoever waited may have gone

        async def answer() -> T:
            return await self.reached(asyncio.shield(task))

        return answer()


def hosted(epoch: int, machines: Sequence[str]) -> WeightGroupReady:
    told = {"rank": 0, "world_size": len(machines), "backend": "gloo", "timeout": 1.0, "key": b"", "machines": tuple(machines)}
    address = GroupAddress(epoch=epoch, host="127.0.0.1", port=1, **told)
    return WeightGroupReady(address, MANIFEST)


class FakeTrainer(FakeModel):
    name = "trainer-0"
    machines = MappingProxyType({"trainer-0": "here"})

    def __init__(self, weights: Weights, apply_seconds: Callable[[], float] = no_time, incarnation: int = 0):
        super().__init__(apply_seconds, incarnation)
        self.calls: list[tuple[str, Any]] = []
        self.probed: dict[int, list[int]] = {}
        """By step, the step of the weights that each probe was sampled with."""
        self._weights = weights

    async def init_weight_group(self, epoch: int, names: Sequence[str], machines: Sequence[str]) -> WeightGroupReady:
        await self.reached(no_wait())
        return hosted(epoch, machines)

    def apply(self, step: int, probes: Sequence[bytes] = ()) -> Coroutine[Any, Any, StepResult]:
        """What a rollout with other weights than those of `step` says is 1 nat off."""
        self.probed[step] = [int(types.decode(GroupPayload, probe).samples[0].logprobs[0]) for probe in probes]
        gaps = [float(weights != step) for weights in self.probed[step]]
        return self._post("apply", step, lambda: self._compared(step, gaps))

    async def _compared(self, step: int, gaps: list[float]) -> StepResult:
        return replace(await self.applied(step), probes=gaps)

    def send_weights(self, version: PolicyVersion, epoch: int) -> Coroutine[Any, Any, WeightsSent]:
        return self._post("send_weights", version.step, lambda: self.send(version))

    def resend_weights(self, version: PolicyVersion, epoch: int) -> Coroutine[Any, Any, WeightsSent]:
        return self.send_weights(version, epoch)

    def export(self, folder: str) -> Coroutine[Any, Any, None]:
        return self._post("export", 0, no_wait)

    async def abort_weights(self, version: PolicyVersion, epoch: int) -> None:
        await self.reached(no_wait())
        self.calls.append(("abort", version.step))

    async def send(self, version: PolicyVersion) -> WeightsSent:
        self._weights.of(version).set()
        return WeightsSent(BYTES, 0.0, GATHERED)


class FakeCritic(FakeModel):
    """Its metrics have one of the trainer's names among them, which must not get through."""

    name = "critic-0"

    def __init__(self, apply_seconds: Callable[[], float] = no_time, incarnation: int = 0):
        super().__init__(apply_seconds, incarnation)
        self.asked: list[ValueRequest] = []

    async def values(self, request: ValueRequest) -> bytes:
        self.asked.append(request)
        await self.reached(asyncio.sleep(self._apply_seconds()))
        return b"values of " + request.payload

    def metrics(self) -> dict[str, float]:
        return {"critic/loss": 0.25, "actor/grad_norm": -1.0}


def leave_state(folder: Path, name: str) -> None:
    """In a folder that exists and is empty."""
    assert [*folder.iterdir()] in ([], [folder / checkpoint.CRITIC])
    (folder / STATE).write_text(name)


def checkpoint_step(folder: str) -> int:
    """The step of a checkpoint, of whose temporary folder, or a part of it, this is the name."""
    (step,) = re.findall(r"/\.step-(\d+)\.partial", folder)
    return int(step)


class LongTail:
    """Seconds of which most are short and a few very long, a different one at each call."""

    def __init__(self, seed: int, scale: float = 0.0005, longest: float = 0.05):
        self._random = random.Random(seed)
        self._scale, self._longest = scale, longest

    def __call__(self) -> float:
        return min(self._longest, self._scale * self._random.paretovariate(0.9))


class FakeReplica(Losable):
    """One of several."""

    machine = "here"

    @property
    def machines(self) -> dict[str, str]:
        return {self.name: self.machine}


class FakeRollout(FakeReplica):
    """Generates with the version that it last committed. `generated_by` is the version at the start of each group."""

    def __init__(self, name: str, weights: Weights, seconds: Callable[[], float] = no_time, incarnation: int = 0):
        super().__init__(incarnation)
        self.name = name
        self.calls: list[tuple[str, Any]] = []
        self.version = self.has = PolicyVersion()
        self.generated_by: dict[int, PolicyVersion] = {}
        self.requests: list[GroupRequest] = []
        self.probes: list[GroupRequest] = []
        self.address: GroupAddress | None = None
        self._weights = weights
        self._seconds = seconds

    async def join_weights(self, address: GroupAddress, manifest: Manifest) -> None:
        await self.reached(no_wait())
        assert manifest == MANIFEST
        self.address = address

    async def init_weight_group(self, epoch: int, names: Sequence[str], machines: Sequence[str]) -> WeightGroupReady:
        await self.reached(no_wait())
        self.calls.append(("host", len(machines)))
        return hosted(epoch, machines)

    async def resend_weights(self, version: PolicyVersion, epoch: int) -> WeightsSent:
        await self.reached(no_wait())
        assert self.version == version
        self.calls.append(("resend", version.step))
        self._weights.of(version).set()
        return WeightsSent(BYTES, 0.0)

    async def generate(self, request: GroupRequest) -> GeneratedGroup:
        if request.purpose == "probe":
            return await self.reached(self.probed(request))
        self.requests.append(request)
        return await self.reached(self._generate(request))

    async def probed(self, request: GroupRequest) -> GeneratedGroup:
        """Its log-probabilities are the step of the weights that it has."""
        self.probes.append(request)
        payload = types.decode(GroupPayload, replies(request, self.version, self.version))
        payload.logprobs = np.full_like(payload.logprobs, self.has.step)
        return generated(request, self.version, self.version, types.encode(payload))

    async def _generate(self, request: GroupRequest) -> GeneratedGroup:
        oldest = self.generated_by[request.group_id] = self.version
        await asyncio.sleep(self._seconds())
        train = request.purpose == "train"
        payload = b"payload %d" % request.group_id if train else replies(request, oldest, self.version)
        return generated(request, oldest, self.version, payload)

    async def receive_weights(self, version: PolicyVersion, epoch: int) -> WeightsReceived:
        self.calls.append(("receive", version.step))
        await self.reached(self._weights.of(version).wait())
        self.calls.append(("verified", version.step))
        return WeightsReceived()

    async def commit_weights(self, version: PolicyVersion, epoch: int) -> WeightsCommitted:
        await self.reached(no_wait())
        self.calls.append(("commit", version.step))
        self.version = self.has = version
        return WeightsCommitted(0.001)

    async def abort_weights(self, version: PolicyVersion, epoch: int) -> None:
        await self.reached(no_wait())
        self.calls.append(("abort", version.step))

    async def set_level(self, level: Level, keeps: bool = False) -> None:
        await self.reached(no_wait())
        self.calls.append(("move", level))

    async def status(self) -> Status:
        return Status(role="rollout", name=self.name, gauges=dict.fromkeys(COUNTED, 0.0))


def generated(request: GroupRequest, oldest: PolicyVersion, newest: PolicyVersion, payload: bytes) -> GeneratedGroup:
    tokens = [1 + (request.group_id + i) % 7 for i in range(request.n)]
    told = {"prompt_tokens": len(request.prompt), "response_tokens": tokens, "truncated": 0}
    return GeneratedGroup(group_id=request.group_id, oldest=oldest, newest=newest, payload=payload, **told)


def replies(request: GroupRequest, oldest: PolicyVersion, newest: PolicyVersion) -> bytes:
    """The payload of an evaluation's group: replies of as many tokens as the header says, the first and the last of which
    are of the versions given."""
    samples = []
    for index in range(request.n):
        size = 1 + (request.group_id + index) % 7
        versions = np.full(size, newest.pack(), np.int64)
        versions[0] = oldest.pack()
        tokens = np.arange(request.first + index, request.first + index + size, dtype=np.int32)
        mask, logprobs = np.ones(size, np.uint8), np.full(size, -0.5, np.float32)
        samples.append(Sample(tokens=tokens, loss_mask=mask, logprobs=logprobs, versions=versions, finish_reason="stop"))
    return types.encode(GroupPayload.of(request.group_id, request.prompt, samples))


class Numbers:
    """A tokenizer whose text is the numbers of its tokens."""

    def decode(self, ids: np.ndarray, skip_special: bool = True) -> str:
        return " ".join(map(str, ids.tolist()))

    def decode_batch(self, batch: Sequence[np.ndarray], skip_special: bool = True) -> list[str]:
        return [self.decode(ids) for ids in batch]


class FakeReward(FakeReplica):
    """Finds every reply right."""

    name = "reward-0"
    rule = "gsm8k"

    def __init__(self, seconds: Callable[[], float] = no_time, group_size: int = 2, incarnation: int = 0):
        super().__init__(incarnation)
        self.asked: list[ScoreRequest] = []
        self._seconds = seconds
        self._group_size = group_size

    def value(self, request: ScoreRequest) -> float:
        return 1.0

    async def score(self, request: ScoreRequest) -> Scores:
        self.asked.append(request)
        assert request.extra == {"label": request.label}  # also of a group that an earlier life of the coordinator admitted
        value = self.value(request)
        await self.reached(asyncio.sleep(self._seconds()))
        evaluated = request.group_id < 0  # an evaluation's groups count down from -1
        n = len(types.decode(GroupPayload, request.payload).samples) if evaluated else self._group_size
        values = np.full(n, value, np.float32)
        scores = Scores(group_id=request.group_id, rewards=values, valid=np.ones(n, np.uint8), rules={self.rule: values})
        return replace(scores, answers=[request.label] * n if request.answers else [])


class FakeRewardModel(FakeReward):
    """Gives every reply 0.25."""

    name = "reward_model-0"
    rule = "reward_model"

    def value(self, request: ScoreRequest) -> float:
        return 0.25


class FakeReference(FakeReplica):
    name = "reference-0"

    def __init__(self, seconds: Callable[[], float] = no_time, incarnation: int = 0):
        super().__init__(incarnation)
        self.asked: list[LogprobRequest] = []
        self._seconds = seconds

    async def onload(self) -> None:
        await self.reached(no_wait())

    async def offload(self) -> None:
        await self.reached(no_wait())

    async def logprobs(self, request: LogprobRequest) -> bytes:
        self.asked.append(request)
        await self.reached(asyncio.sleep(self._seconds()))
        return b"reference " + request.payload


@dataclass
class Cast:
    """The roles of one run; replace what should behave otherwise."""

    weights: Weights
    trainer: FakeTrainer
    rollouts: list[FakeRollout]
    reward: FakeReward | None
    reference: FakeReference
    critic: FakeCritic | None = None
    reward_model: FakeRewardModel | None = None
    regroup: Callable[[], Awaitable[list[FakeTrainer | FakeCritic]]] | None = None  # after the loss of trainer or critic

    @classmethod
    def make(cls, seed: int | None = 0) -> Cast:
        """Each takes its time, drawn by `seed`; without one nothing takes any."""

        def tail(number: int, *scale: float) -> Callable[[], float]:
            return no_time if seed is None else LongTail(seed + number, *scale)

        weights = Weights()
        rollouts = [FakeRollout(f"rollout-{i}", weights, tail(10 + i)) for i in range(2)]
        return cls(weights, FakeTrainer(weights, tail(1, 0.001, 0.01)), rollouts, FakeReward(tail(2)), FakeReference(tail(3)))

    @classmethod
    def prompt(cls) -> Cast:
        return cls.make(None)

    def register(self) -> Register:
        """All of them are connected."""
        register = Register()
        for role, ports in self._ports().items():
            for port in ports:
                if port is not None:
                    register.add(role, port)
        return register

    def _ports(self) -> dict[str, list[Losable | None]]:
        return {
            "rollout": [*self.rollouts],
            "reward": [self.reward],
            "reward_model": [self.reward_model],
            "reference": [self.reference],
            "trainer": [self.trainer],
            "critic": [self.critic],
        }

    def generated_by(self) -> dict[int, PolicyVersion]:
        """The version at the start of each group, as the rollouts saw it."""
        return {group: version for rollout in self.rollouts for group, version in rollout.generated_by.items()}


def around(
    port: P,
    method: str,
    before: Callable[..., Awaitable[None]] | None = None,
    after: Callable[..., Awaitable[Any]] | None = None,
) -> P:
    """`port`, whose `method` does `before(*arguments)` first, and answers what `after(answer, *arguments)` makes of it."""
    does = getattr(port, method)

    def wrapped(*arguments: Any) -> Coroutine[Any, Any, Any]:
        begun = does(*arguments) if before is None else None

        async def answer() -> Any:
            if before is not None:
                await before(*arguments)
            found = await (does(*arguments) if begun is None else begun)
            return found if after is None else await after(found, *arguments)

        return answer()

    setattr(port, method, wrapped)
    return port


def broken(port: P, method: str, at: int, error: Exception | None = None) -> P:
    """`port`, whose `method` fails for what is of group or step `at`, or of a later one."""

    async def fails(what: Any) -> None:
        if getattr(what, "group_id", what) >= at:
            raise error or ServiceFault(port.name, method, "connection lost")

    return around(port, method, before=fails)


class FakeSupervisor(RunSupervisor):
    """Keeps what it is told; once the run waits for other models those come that `regroup` returns, where any do."""

    def __init__(
        self,
        register: Register,
        progress: list[Progress],
        losses: list[Loss],
        regroup: Callable[[], Awaitable[list[FakeTrainer | FakeCritic]]] | None,
    ):
        super().__init__(register, Progress())
        self._told, self._losses, self._regroup = progress, losses, regroup
        self._coming: asyncio.Task[None]
        self.restarts = regroup is not None
        register.subscribe(self._look)

    def report(self, progress: Progress) -> None:
        self._told.append(progress)
        if progress.phase == "recovering" and self._register.units("trainer", UnitState.LOST):
            self._coming = asyncio.ensure_future(self._restart())

    def _look(self, change: UnitChange) -> None:
        unit = change.unit
        if unit.state is UnitState.LOST:
            self._losses.append(Loss(name=unit.name, incarnation=unit.incarnation, reason=unit.reason))

    async def _restart(self) -> None:
        assert self._regroup is not None
        for model in await self._regroup():
            self._register.add(model.name.rpartition("-")[0], model)


@dataclass
class RunFolder:
    """One run's folder and settings; `run` may be called again to resume."""

    path: Path
    steps: int = 12
    staleness: int = 2
    groups_per_step: int = 4
    problems: int = 23
    eval_problems: int = 0
    in_memory: Literal["auto", "off"] = "off"
    """Copies in memory. Without them a loss leads back to a checkpoint."""
    holders: set[Holder] = field(default_factory=set)
    """The agents that hold blobs now."""
    sections: dict[str, Any] = field(default_factory=dict)
    progress: list[Progress] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)

    def config(self, resume: str = "") -> Config:
        base = Config(
            run=config.Run(name="test", dir=str(self.path), resume=resume),
            sampling=config.Sampling(group_size=2, max_new_tokens=8),
            evaluation=config.Evaluation(before=False, after=False, max_new_tokens=8),
            rewards=config.Rewards(rules=[config.Rule(name="gsm8k")]),
            algorithm=config.Algorithm(kl_coefficient=0.1),
            training=config.Training(steps=self.steps, staleness=self.staleness, groups_per_step=self.groups_per_step),
            services=config.Services(rollout=config.Rollout(replicas=2, max_num_seqs=16)),
            weight_sync=config.WeightSyncConfig(transfer_timeout=20.0, commit_timeout=20.0),
            trackers=[config.Tracker(name="jsonl")],
        )
        settings = replace(base, **self.sections)
        return replace(settings, checkpoint=replace(settings.checkpoint, in_memory=self.in_memory))

    def run(self, cast: Cast, course: Callable[[TrainingRun], Awaitable[None]] | None = None, resume: str = "") -> Summary:
        """Execute one run; `course(run)` goes on beside it. Raises what the coordinator would tell."""
        return asyncio.run(asyncio.wait_for(self._execute(cast, course, resume), DEADLINE))

    def fails(self, cast: Cast, course: Callable[[TrainingRun], Awaitable[None]] | None = None) -> ServiceFault:
        """Execute one run that is to fail, and return the fault."""
        with pytest.raises(ServiceFault) as raised:
            self.run(cast, course)
        return raised.value

    async def _execute(self, cast: Cast, course: Callable[[TrainingRun], Awaitable[None]] | None, resume: str) -> Summary:
        settings = self.config(resume)
        ledger = await LedgerWriter.open(self.path / "ledger")
        trackers = Trackers(settings, self.path)
        register = cast.register()
        try:
            context = RunContext(
                config=settings,
                ledger=ledger,
                trackers=trackers,
                train=_prompts("train", self.problems),
                held_out=self.held_out(settings),
                text=Numbers(),
                stop_token_ids=(0,),
                supervisor=FakeSupervisor(register, self.progress, self.losses, cast.regroup),
                epoch=time.time() - time.monotonic(),
                launched=time.monotonic(),
                history=RunHistory(resume),
                holders=self.held_by,
            )
            run = TrainingRun(context, register)
            beside = asyncio.create_task(course(run)) if course is not None else None  # type: ignore[arg-type]
            try:
                summary = await run.execute()
            except Exception as error:  # noqa: BLE001 - it comes in a group
                raise first_error(error) from None
            if beside is not None:
                await beside
            return summary
        finally:
            await trackers.close()
            await ledger.close()

    async def held_by(self) -> set[Holder]:
        return self.holders

    def held_out(self, settings: Config) -> list[HeldOut]:
        """One set of `eval_problems` for each that the configuration names, and one where it names none."""
        if not self.eval_problems:
            return []
        named = evaluation_sets(settings) or evaluation_sets(replace(settings, data=config.Data(eval="eval.jsonl")))
        return [HeldOut(each, _prompts(each.name, self.eval_problems)) for each in named]

    # ------------------------------------------------------------------------------------------ what it left
    def groups(self, *phases: Phase) -> list[GroupRow]:
        with LedgerReader(self.path / "ledger") as reader:
            return list(reader.groups(states=phases))

    def dropped(self) -> dict[str, int]:
        with LedgerReader(self.path / "ledger") as reader:
            return reader.dropped()

    def trained_problems(self) -> list[int]:
        """The prompts that were trained on, in no order."""
        return sorted(group.problem for group in self.groups(Phase.RETIRED))

    def first_prompts(self, groups: int) -> list[int]:
        """The prompts of the first `groups` groups of a run without interruption, in no order."""
        stream = PromptStream(_prompts("train", self.problems).problems, self.config().run.seed)
        return sorted(stream.draw().index for _ in range(groups))

    def points(self) -> list[dict[str, Any]]:
        return read_jsonl(self.path / run_files.METRICS)

    def checkpoint(self, step: int) -> Path:
        return checkpoint.folder_for(self.path, step)

    def position(self, step: int) -> Position:
        return checkpoint.read_position(self.checkpoint(step))


def _prompts(name: str, count: int) -> Prompts:
    problems = [
        Problem(f"{name}:{i}", [{"role": "user", "content": str(i)}], str(i), f"test/{name}", extra={"label": str(i)})
        for i in range(count)
    ]
    return Prompts(problems=problems, tokens=[np.arange(3, dtype=np.int32)] * count, rows=count, dropped={})


# ------------------------------------------------------------------------------------------------------ what holds of every run
def check_order(trainer: FakeTrainer, first: int, last: int) -> None:
    """Each step: begin, accumulate at least once, apply, then its weights, before anything of the next step; then saves."""
    commands = [command for command in trainer.posted if command[0] not in ("save", "export")]
    assert commands.pop(0) == ("send_weights", first)
    for step in range(first, last):
        assert commands.pop(0) == ("begin", step)
        sent = list(itertools.takewhile(lambda command, now=("accumulate", step): command == now, commands))
        assert sent, f"nothing was accumulated for step {step}"
        del commands[: len(sent)]
        assert commands.pop(0) == ("apply", step)
        assert commands.pop(0) == ("send_weights", step + 1)
    assert commands == []


def check_books(folder: RunFolder, steps: int) -> None:
    """The ledger holds every group in one final state, and each step trained on B of them."""
    with LedgerReader(folder.path / "ledger") as reader:
        counts = reader.check_final(folder.groups_per_step)
    assert counts["retired"] == steps * folder.groups_per_step
    by_step = Counter(group.step for group in folder.groups(Phase.RETIRED))
    assert by_step == dict.fromkeys(range(steps), folder.groups_per_step)
