"""What becomes of running sequences when new weights are swapped in: they keep their keys and values, have them computed
anew, or finish first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from runtime import config
from runtime.commands import AbortWeights, CommitWeights, Priority, WeightsCommitted
from runtime.errors import ServiceFault, UserError
from runtime.rollout.torch import engine as rollout_torch
from runtime.rollout.torch import slots as rollout_slots
from runtime.rollout.torch.engine import TorchRolloutEngine
from runtime.types import GeneratedGroup, GroupRequest, PolicyVersion
from services.rollout import RolloutService
from tests.closeness import LOGITS, assert_close, forward_terms, gamma
from tests.unit.actor_desk import run, running
from tests.unit.rollout_cases import Make, begin, drain, engines, from_scratch, never, request, samples, update
from tests.unit.tiny_models import saved

pytestmark = pytest.mark.numeric

OLD, NEW = PolicyVersion(0, 0), PolicyVersion(0, 1)


class Models:
    """The engine's model and another of the same family, as transformers knows them."""

    def __init__(self, family: str, make: Make):
        (self.path, self.old), (folder, self.new) = saved(family), saved(family, 1)
        self.tensors = load_file(folder / "model.safetensors")
        self.engine = partial(make, path=self.path, max_model_len=256)


@pytest.fixture(params=["qwen2"])
def models(request: pytest.FixtureRequest) -> Iterator[Models]:
    with engines(saved()[0]) as make:
        yield Models(request.param, make)


def versions(group: GeneratedGroup) -> list[list[int]]:
    """The steps of the versions of each sample's tokens, repetitions left out."""
    return [sorted({PolicyVersion.unpack(int(v)).step for v in each.versions}) for each in samples(group)]


# ---------------------------------------------------------------------------------------------- the engine


def swapped_midway(engine: TorchRolloutEngine, models: Models, requests: list[GroupRequest], recompute: bool) -> dict[int, Any]:
    """The samples by group when weights are swapped after nine steps."""

    async def session() -> dict[int, Any]:
        done = await begin(engine, requests, 9)
        await update(engine, models.tensors, NEW, recompute)
        done += [group async for group in drain(engine)]
        return {group.group_id: samples(group) for group in done}

    return asyncio.run(session())


def of_many_lengths() -> list[GroupRequest]:
    """The second group ends before the swap and leaves a hole; the last ones have no slot yet."""
    prompts = [range(20), (7,), range(1, 6), (9, 9), range(30, 43), (3, 1, 4)]
    limits = [30, 9, 25, 40, 17, 20]
    return [request(i, 2, tuple(prompt), limit) for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))]


@pytest.mark.parametrize(
    ("models", "together"),
    [("qwen2", 8192), ("qwen2", 40), ("qwen3", 40), ("llama3_scaled", 8192), ("gemma3", 40), ("gpt_oss", 8192)],
    indirect=["models"],
)
def test_recomputed_sequences_go_on_as_the_new_weights_would(
    models: Models, monkeypatch: pytest.MonkeyPatch, together: int
) -> None:
    """Whether they are recomputed in one batch or in several."""
    monkeypatch.setattr(rollout_torch, "_PREFILL_TOKENS", together)
    monkeypatch.setattr(rollout_slots, "_WORTH_SPLITTING", 0)  # sequences change their slots
    requests = of_many_lengths()
    done = swapped_midway(models.engine(slots=9), models, requests, recompute=True)
    mixed = 0
    for each in requests:
        for sample in done[each.group_id]:
            before = sample.versions == OLD.pack()
            expected = np.where(before, *(from_scratch(model, each.prompt, sample) for model in (models.old, models.new)))
            assert_close(sample.logprobs, expected, terms=forward_terms(64), scale=LOGITS)
            mixed += len(set(before)) == 2
    assert mixed >= 7


def test_both_draw_the_same_tokens_before_the_swap_and_after_it_where_nothing_changed(models: Models) -> None:
    requests = of_many_lengths()
    models.tensors = load_file(models.path / "model.safetensors")
    kept, recomputed = (swapped_midway(models.engine(slots=9), models, requests, policy) for policy in (False, True))
    for group_id, expected in kept.items():
        assert [s.tokens.tolist() for s in recomputed[group_id]] == [s.tokens.tolist() for s in expected]


def test_a_held_engine_finishes_what_is_running_and_begins_nothing(models: Models) -> None:
    engine = models.engine(slots=3)

    async def session() -> dict[int, list[list[int]]]:
        await begin(engine, [request(0, n=2, limit=20), request(1, n=2, limit=30)], 3)
        engine.held = True
        engine.submit([request(2, n=1)])
        done = [group async for group in drain(engine)]
        assert (engine.stats().running, engine.stats().waiting, engine.has_work) == (0, 2, False)
        assert await engine.advance(never) == []
        await update(engine, models.tensors, NEW)
        engine.held = False
        done += [group async for group in drain(engine)]
        return {group.group_id: versions(group) for group in done}

    assert asyncio.run(session()) == {0: [[0], [0]], 1: [[0], [1]], 2: [[1]]}


# ---------------------------------------------------------------------------------------------- the service


class Stage:
    """Weights that were received whole."""

    version = NEW

    def release(self) -> None:
        """To be forgotten."""


class Desk:
    """A rollout service behind its actor, with weights staged; slots for three sequences."""

    def __init__(self, models: Models, in_flight: Any):
        weight_sync = config.WeightSyncConfig(in_flight=in_flight)
        settings = config.Config(run=config.Run(name="test"), weight_sync=weight_sync)
        self.service = RolloutService(settings, "rollout-0", 0)
        self.engine = models.engine(slots=3)
        self.service.use(self.engine)
        self.stage = Stage()
        self._tensors = models.tensors
        self.service.weights.epoch, self.service.weights._received = 1, NEW
        self.service.weights._staged, self.service.weights._adopts = self.stage, True  # type: ignore[assignment]
        self.actor = self.service._actor

    def generate(self, *requests: GroupRequest) -> list[asyncio.Future[GeneratedGroup]]:
        return [self.actor.send(each) for each in requests]

    def commit(self) -> asyncio.Future[WeightsCommitted]:
        return self.actor.send(CommitWeights(NEW, 1), priority=Priority.CONTROL)

    @asynccontextmanager
    async def busy(self) -> AsyncIterator[list[asyncio.Future[GeneratedGroup]]]:
        """Yields three groups: two with all slots for a long time to come, and one that waits."""
        long = [request(group_id, n=n, limit=120) for group_id, n in ((1, 1), (2, 2), (3, 1))]
        async with running(self.actor):
            soon, *others = self.generate(request(0, n=1, limit=2), *long)
            await soon
            await self.engine.stage(self._tensors)
            yield others


Groups = list[asyncio.Future[GeneratedGroup]]


def busy(models: Models, in_flight: str, test: Callable[[Desk, Groups], Awaitable[None]]) -> None:
    async def within() -> None:
        desk = Desk(models, in_flight)
        async with desk.busy() as groups:
            await test(desk, groups)

    run(within())


@pytest.mark.parametrize("in_flight", ["keep", "recompute"])
def test_a_commit_swaps_at_once_where_samples_keep_or_recompute(models: Models, in_flight: str) -> None:
    async def test(desk: Desk, groups: Groups) -> None:
        await desk.commit()
        assert (desk.service.weights._adopted, desk.service.version) == (desk.stage, NEW)
        assert not any(group.done() for group in groups)
        (sample,) = samples(await groups[0])
        after = sample.versions == NEW.pack()
        apart = np.abs(sample.logprobs - from_scratch(models.new, request(1).prompt, sample))[after].max()
        assert (apart < 2 * LOGITS * gamma(forward_terms(256))) == (in_flight == "recompute")
        assert [versions(await group) for group in groups] == [[[0, 1]], [[0, 1], [0, 1]], [[1]]]

    busy(models, in_flight, test)


def test_weights_that_would_never_fit_end_the_process_as_a_mistake(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another in its place would only find the same: exit code 2 ends the run."""

    async def swap(version: PolicyVersion, recompute: bool = False) -> None:
        raise UserError("model.path: these are other weights")

    async def test(desk: Desk, groups: Groups) -> None:
        ended = asyncio.get_running_loop().create_future()
        monkeypatch.setattr(desk.engine, "swap", swap)
        monkeypatch.setattr("runtime.process.os_process.end_at_once", lambda *told: ended.set_result(told))
        commit = desk.commit()
        assert await ended == ("model.path: these are other weights", 2)
        assert not commit.done()  # or the coordinator might end it first, and have it started again

    busy(models, "keep", test)


def test_a_draining_commit_waits_for_what_is_running_alone(models: Models) -> None:
    async def test(desk: Desk, groups: Groups) -> None:
        first, second, waiting = groups
        committing = desk.commit()
        late = desk.generate(request(4, n=1, limit=3))[0]  # short, but not begun when the commit came
        assert (await committing).pause_seconds > 0
        assert [group.done() for group in (first, second, waiting, late)] == [True, True, False, False]
        assert (desk.service.weights._adopted, desk.service.version) == (desk.stage, NEW)
        found = [versions(await group) for group in (first, second, waiting, late)]
        assert found == [[[0]], [[0], [0]], [[1]], [[1]]]

    busy(models, "drain", test)


def test_a_draining_commit_does_not_wait_where_nothing_is_running(models: Models) -> None:
    async def test() -> None:
        desk = Desk(models, "drain")
        async with running(desk.actor):
            await desk.engine.stage(models.tensors)
            await desk.commit()
            assert desk.service.version == NEW

    run(test())


def test_groups_that_are_cancelled_are_not_waited_for(models: Models) -> None:
    async def test(desk: Desk, groups: Groups) -> None:
        first, second, waiting = groups
        committing = desk.commit()
        first.cancel()
        second.cancel()
        await committing
        assert desk.engine.stats().decode_steps < 120
        assert versions(await waiting) == [[1]]

    busy(models, "drain", test)


def test_what_is_withdrawn_ends_though_nothing_else_is_asked(models: Models) -> None:
    async def test(desk: Desk, groups: Groups) -> None:
        for group in groups:
            group.cancel()
        while desk.service.busy:  # noqa: ASYNC110 - of what is withdrawn there is no answer
            await asyncio.sleep(0)
        assert desk.engine.stats().running == 0
        assert desk.engine.stats().decode_steps < 120

    busy(models, "keep", test)


def test_a_draining_commit_that_is_cancelled_is_given_up(models: Models) -> None:
    """As when its deadline has passed: the weights stay, and the groups that waited for it go on."""

    async def test(desk: Desk, groups: Groups) -> None:
        committing = desk.commit()
        await desk.actor.send(AbortWeights(NEW, 9), priority=Priority.CONTROL)  # behind it: the commit was taken in
        committing.cancel()
        assert [versions(await group) for group in groups] == [[[0]], [[0], [0]], [[0]]]
        assert desk.service.version == OLD

    busy(models, "drain", test)


def test_an_abort_ends_a_draining_commit(models: Models) -> None:
    async def test(desk: Desk, groups: Groups) -> None:
        committing = desk.commit()
        await desk.actor.send(AbortWeights(NEW, 1), priority=Priority.CONTROL)
        with pytest.raises(ServiceFault, match="rollout-0: commit: was aborted while sequences were still running"):
            await committing
        assert [versions(await group) for group in groups] == [[[0]], [[0], [0]], [[0]]]

    busy(models, "drain", test)
