"""Evaluation through the same rollouts and rewards as training, beside it: groups that no step trains on.

An evaluation before or after training is pinned to one version, as no publication happens then. One during training runs while
versions change; it reports the range that its tokens span.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from itertools import count

from msgspec import Struct

from runtime.config import Config
from runtime.data.prompts import Prompts, group_seed
from runtime.ledger import Ledger
from runtime.ledger_records import Evaluated
from runtime.pipeline.roles import Roles, RolloutPool
from runtime.pipeline.scoring import Scoring
from runtime.types import GroupRequest, PolicyVersion, SamplingParams, ScoreRequest

SHARE = 4  # of the rollouts' slots, an evaluation during training takes at most one in so many


class Evaluation(Struct, frozen=True, kw_only=True):
    """`accuracy`: samples on which the first rule earned its `correct`, over all whose rules ran; `errors` counts the rest."""

    accuracy: float
    samples: int
    errors: int
    oldest: PolicyVersion
    newest: PolicyVersion
    seconds: float


class Evaluator:
    """Evaluates on the same problems, with the same seeds, each time."""

    def __init__(
        self,
        config: Config,
        roles: Roles,
        pool: RolloutPool,
        ledger: Ledger,
        prompts: Prompts,
        stop_token_ids: tuple[int, ...],
    ):
        settings = config.evaluation
        self._rule = config.rewards.rules[0].name.rpartition(":")[2]  # a rule of one's own is FILE.py:NAME
        self._correct = config.rewards.rules[0].correct
        self._samples = settings.samples
        self._seed = config.run.seed
        self._scoring = Scoring(roles)
        self._pool = pool
        self._ledger = ledger
        self._prompts = prompts
        self._problems = settings.problems or len(prompts.problems)
        self._sampling = SamplingParams(
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            min_p=settings.min_p,
            stop_token_ids=stop_token_ids,
        )
        slots = config.services.rollout.slots * config.services.rollout.replicas
        self._most = {True: max(1, 2 * slots // self._samples), False: max(1, slots // SHARE // self._samples)}
        self._ids = count(-1, -1)  # negative: never a training group's

    async def run(self, step: int, alone: bool, progress: Callable[[int, int], None] = lambda done, total: None) -> Evaluation:
        """Evaluate after `step` optimizer steps. `alone`: nothing else needs the rollouts."""
        before = time.monotonic()
        total = min(self._problems, len(self._prompts.problems))
        gate = asyncio.Semaphore(self._most[alone])
        done: list[Evaluated] = []

        async def one(index: int) -> None:
            async with gate:
                done.append(await self._problem(index, step))
            progress(len(done), total)

        await asyncio.gather(*map(one, range(total)))
        for record in done:
            self._ledger.record(record)
        valid = sum(int(record.scores.valid.sum()) for record in done)
        right = sum(
            int((record.scores.rules[self._rule][record.scores.valid.astype(bool)] >= self._correct).sum()) for record in done
        )
        return Evaluation(
            accuracy=right / max(valid, 1),
            samples=valid,
            errors=total * self._samples - valid,
            oldest=min(record.generated.oldest for record in done),
            newest=max(record.generated.newest for record in done),
            seconds=time.monotonic() - before,
        )

    async def _problem(self, index: int, step: int) -> Evaluated:
        problem = self._prompts.problems[index]
        request = GroupRequest(
            group_id=next(self._ids),
            prompt=self._prompts.tokens[index],
            n=self._samples,
            seed=group_seed(self._seed, index),
            sampling=self._sampling,
            purpose="eval",
        )
        generated = await self._pool.generate(self._pool.least_loaded(), request)
        question = ScoreRequest(
            group_id=request.group_id,
            label=problem.label,
            payload=generated.payload,
            source=problem.source,
            messages=problem.messages,
        )
        scores = await self._scoring.score(question, index)
        return Evaluated(step=step, problem=problem.id, label=problem.label, generated=generated, scores=scores, at=time.time())
