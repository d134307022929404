"""Evaluation through the same rollouts and rewards as training, in parallel with it. No step trains on these replies.

An evaluation before or after training is pinned to one version. During training it reports the range of versions of its tokens.

An evaluation never stalls training: no part of training waits for it, and it has at most a `SHARE` of the rollouts' slots. A
problem with more samples is requested in parts, as a rollout takes requests in order: others would wait behind a large one.
The room is kept until the replies are scored, which limits the reward services' load too. A thread decodes and writes replies.
"""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from runtime import run_files, types
from runtime.cluster.topology import slots, takes_turns
from runtime.commands import Level, SetLevel
from runtime.config import Rule
from runtime.coordinator.gateways import rollout_pool
from runtime.coordinator.metrics_recorder import EvaluationContext
from runtime.coordinator.pools import Replicas, RewardScoring, RolloutPool, request_for, score_request, scorers
from runtime.coordinator.register import ROLLOUT, Register, Unit, UnitChange, UnitState
from runtime.data.prompts import group_seed
from runtime.errors import SluiceError
from runtime.evaluation import results as evaluation
from runtime.evaluation.results import STEP, SUFFIX, EvaluatedProblem, EvaluationResult, Generation, judge_of, replies_to
from runtime.process import waiting
from runtime.process.waiting import now
from runtime.status import Progress
from runtime.types import GeneratedGroup, GroupPayload, SamplingParams, Scores

SHARE = 4  # an evaluation during training takes at most this fraction (1/4) of the rollouts' slots

ReportDone = Callable[[int, int], None]
Part = tuple[GeneratedGroup, Scores]


class WeightedSemaphore:
    """Room for `free` samples, given out in the order of the requests."""

    def __init__(self, free: int):
        self._free = free
        self._line = asyncio.Lock()
        self._given_back = asyncio.Event()

    @asynccontextmanager
    async def taken(self, samples: int) -> AsyncIterator[None]:
        async with self._line:
            while self._free < samples:
                self._given_back.clear()
                await self._given_back.wait()
            self._free -= samples
        try:
            yield
        finally:
            self._free += samples
            self._given_back.set()


class Transcript:
    """The file of one set's replies. Problems arrive in any order; lines are written in the order of the problems."""

    def __init__(self, path: Path):
        self._waiting: dict[int, bytes] = {}
        self._next = 0
        self._file = waiting.until_done(lambda: path.open("wb", buffering=0), path)

    def add(self, place: int, replies: Sequence[Generation]) -> None:
        """Write the replies to problem `place`, or keep them until the replies to earlier problems are there."""
        self._waiting[place] = b"".join(msgspec.json.encode(each) + b"\n" for each in replies)
        while (lines := self._waiting.pop(self._next, None)) is not None:
            waiting.write(self._file, lines)
            self._next += 1

    def close(self) -> None:
        """Write the replies that are left, even if earlier problems are missing."""
        with self._file:
            for place in sorted(self._waiting):
                waiting.write(self._file, self._waiting.pop(place))


class Evaluator:
    """Evaluates the same problems, with the same seeds, each time."""

    def __init__(self, context: EvaluationContext, scorers: Mapping[str, Replicas], pool: RolloutPool, judge: Rule):
        """Create the evaluator. `judge`: the rule whose verdicts make the figures."""
        self._config, self._folder, self._sets = context.config, context.folder, context.held_out
        self._pool, self._text, self._judge = pool, context.text, judge
        self._scoring = RewardScoring(scorers, context.config.rewards.environment)
        settings = context.config.evaluation
        self._sampling = [
            SamplingParams(
                max_new_tokens=held_out.settings.max_new_tokens,
                temperature=held_out.settings.temperature,
                top_p=settings.top_p,
                top_k=settings.top_k,
                stop_token_ids=context.stop_token_ids,
            )
            for held_out in self._sets
        ]
        self._ids = count(-1, -1)  # negative, so never the id of a training group

    async def run(self, step: int, alone: bool, progress: ReportDone = lambda done, total: None) -> EvaluationResult:
        """Evaluate after `step` optimizer steps. `alone`: no other work needs the rollouts. Replies and results go into the
        folder of the step. A cancelled evaluation leaves the replies so far. Without room on the disk it waits."""
        before, folder = now(), self._folder / run_files.EVALUATIONS / STEP.format(step)
        shutil.rmtree(folder, ignore_errors=True)
        # In threads, as these calls block until the disk has room.
        await asyncio.to_thread(waiting.until_done, lambda: folder.mkdir(parents=True, exist_ok=True), folder)
        await asyncio.to_thread(self._begin, folder, alone)
        total = sum(len(held_out.prompts.problems) for held_out in self._sets)

        def report() -> None:
            progress(sum(map(len, self._evaluated)), total)

        try:
            # All problems at once; `_room` limits the samples under way. The group ends with the last score.
            async with asyncio.TaskGroup() as tasks:
                for which, held_out in enumerate(self._sets):
                    for index in range(len(held_out.prompts.problems)):
                        tasks.create_task(self._problem(which, index, report))
        finally:
            await self._close()
        return await asyncio.to_thread(self._result, folder, step, now() - before)

    def _begin(self, folder: Path, alone: bool) -> None:
        each = slots(self._config).values()
        # Alone, a queue as long as the slots keeps them full.
        free, largest = (2 * sum(each), min(each)) if alone else (sum(each) // SHARE, min(each) // SHARE)
        self._room, self._largest = WeightedSemaphore(max(1, free)), max(1, largest)
        self._evaluated: list[list[EvaluatedProblem]] = [[] for _ in self._sets]
        self._transcripts = [Transcript(folder / f"{each.settings.name}{SUFFIX}") for each in self._sets]
        self._thread = ThreadPoolExecutor(1, "evaluation")

    async def _close(self) -> None:
        loop = asyncio.get_running_loop()
        closing = [loop.run_in_executor(self._thread, transcript.close) for transcript in self._transcripts]
        self._thread.shutdown(wait=False)
        await asyncio.gather(*closing)

    def _result(self, folder: Path, step: int, seconds: float) -> EvaluationResult:
        rule, evaluated = self._judge.name.rpartition(":")[2], self._evaluated  # a user's rule is FILE.py:NAME
        sets = [evaluation.set_result(each.settings, rule, of_set) for each, of_set in zip(self._sets, evaluated, strict=True)]
        result = EvaluationResult(
            model=self._config.model.path,
            step=step,
            accuracy=sum(each.pass_at[1] for each in sets) / len(sets),
            seconds=seconds,
            oldest=min(each.oldest for of_set in evaluated for each in of_set),
            newest=max(each.newest for of_set in evaluated for each in of_set),
            sets=sets,
        )
        waiting.until_done(lambda: result.write(folder), folder)
        return result

    async def _problem(self, which: int, index: int, report: Callable[[], None]) -> None:
        samples, largest = self._sets[which].settings.samples, self._largest
        async with asyncio.TaskGroup() as tasks:
            sizes = {first: min(largest, samples - first) for first in range(0, samples, largest)}
            parts = [tasks.create_task(self._part(which, index, first, size)) for first, size in sizes.items()]
        done, loop = [part.result() for part in parts], asyncio.get_running_loop()
        self._evaluated[which].append(await loop.run_in_executor(self._thread, self._keep, which, index, done))
        report()

    async def _part(self, which: int, index: int, first: int, samples: int) -> Part:
        """Generate and score one part of a problem, the samples from `first` on."""
        prompts = self._sets[which].prompts
        problem = prompts.problems[index]
        async with self._room.taken(samples):
            request = request_for(
                self._config,
                problem,
                prompts.tokens[index],
                group_id=next(self._ids),
                n=samples,
                seed=group_seed(self._config.run.seed, index),
                first=first,
                sampling=self._sampling[which],
                purpose="eval",
            )
            generated = await self._pool.generate_anywhere(request)
            scoring = score_request(problem, group_id=request.group_id, payload=generated.payload, answers=True)
            return generated, await self._scoring.score(scoring, generated.rewards, index)

    def _keep(self, which: int, index: int, parts: Sequence[Part]) -> EvaluatedProblem:
        """Write the replies to one problem and return the data for its set's figures. Runs in the evaluation's thread."""
        held_out = self._sets[which]
        decoded = [(types.decode(GroupPayload, generated.payload), scores) for generated, scores in parts]
        problem = held_out.prompts.problems[index]
        outcomes = [each for generated, _ in parts if generated.outcomes is not None for each in generated.outcomes.reasons]
        found = replies_to(held_out.settings.name, problem, decoded, self._judge, self._text, outcomes)
        self._transcripts[which].add(index, found)
        return EvaluatedProblem(
            correct=[each.correct for each in found],
            answers=[answer for _, scores in parts for answer in scores.answers],
            tokens=[each.tokens for each in found],
            truncated=sum(each.finish == "length" for each in found),
            errors=dict(sum((Counter(scores.errors) for _, scores in parts), Counter())),
            oldest=min(generated.oldest for generated, _ in parts),
            newest=max(generated.newest for generated, _ in parts),
        )


def evaluator_of(context: EvaluationContext, scorers: Mapping[str, Replicas], pool: RolloutPool) -> Evaluator | None:
    """Create the evaluator. Return None if there are no problems or no judge."""
    judge = judge_of(context.config) if context.held_out else None
    return None if judge is None else Evaluator(context, scorers, pool, judge)


class ServingRun:
    """`sluice serve`: rollouts and gateways of a run without training, with the rollouts' own weights, until `stop`."""

    def __init__(self, context: EvaluationContext, register: Register):
        self._context, self._register, self._stopped = context, register, asyncio.Event()
        self._pool = rollout_pool(context.config, register, context.keys)
        self._serving = {asyncio.ensure_future(self._serve(unit)) for unit in register.units(ROLLOUT, UnitState.CONNECTED)}
        register.subscribe(self._look)

    def _look(self, change: UnitChange) -> None:
        if change.unit.role == ROLLOUT and change.unit.state is UnitState.CONNECTED:
            self._serving.add(asyncio.ensure_future(self._serve(change.unit)))

    async def _serve(self, rollout: Unit) -> None:
        try:
            if takes_turns(self._context.config):  # it starts asleep; without a trainer it keeps the devices
                await rollout.port.call(SetLevel(Level.AWAKE))
        except SluiceError as error:
            self._register.lose(rollout, str(error))
        else:
            if self._register.join(rollout):
                self._pool.serve_as_loaded()

    def stop(self) -> None:
        self._stopped.set()

    async def execute(self) -> Any:
        """Serve until `stop`. Raises ServiceFault, UserError."""
        self._context.supervisor.report(Progress(phase="serving"))
        await self._until_done(asyncio.create_task(self._stopped.wait()))

    async def _until_done(self, work: asyncio.Task[Any]) -> None:
        """Wait for `work`. Raises ServiceFault once no rollout has served for too long."""
        guard = asyncio.create_task(self._pool.guard())
        try:
            await asyncio.wait([work, guard], return_when=asyncio.FIRST_COMPLETED)
            if guard.done():
                guard.result()
        finally:
            guard.cancel()
            work.cancel()


class EvaluationRun(ServingRun):
    """`sluice eval`: one evaluation of the weights that the rollouts loaded. `stop` cancels it."""

    def __init__(self, context: EvaluationContext, register: Register):
        super().__init__(context, register)
        evaluator = evaluator_of(context, scorers(register, context.config.deadlines.start), self._pool)
        assert evaluator is not None, "a configuration without problems or a judge is refused"
        self._evaluator = evaluator
        self._evaluating: asyncio.Task[EvaluationResult] | None = None

    def stop(self) -> None:
        super().stop()
        if self._evaluating is not None:
            self._evaluating.cancel()

    async def execute(self) -> EvaluationResult | None:
        """Return the results, which are also in the run's folder, or None after `stop`. Raises ServiceFault, UserError."""
        if self._stopped.is_set():
            return None

        def report(done: int = 0, total: int = 0) -> None:
            self._context.supervisor.report(Progress(phase="evaluating", done=done, total=total))

        report()
        self._evaluating = asyncio.create_task(self._evaluator.run(0, alone=True, progress=report))
        await self._until_done(self._evaluating)
        if self._evaluating.cancelled():
            return None
        found = self._evaluating.result()
        await self._context.trackers.log(0, evaluation.metrics(found))
        return found
