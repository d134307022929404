"""What becomes of running sequences when new weights are swapped in: they keep their keys and values, have them computed
anew, or finish first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from runtime import config
from runtime.commands import AbortWeights, CommitWeights, Priority, WeightsCommitted
from runtime.errors import ServiceFault, UserError
from runtime.rollout.torch import engine as rollout_torch
from runtime.rollout.torch import slots as rollout_slots
from runtime.rollout.torch.engine import TorchRolloutEngine
from runtime.types import GeneratedGroup, GroupRequest, PolicyVersion
from services.rollout import RolloutService
from tests.closeness import LOGITS, assert_close, forward_terms
from tests.unit.actor_desk import run, running
from tests.unit.rollout_cases import drain, from_scratch, never, request, samples, update
from tests.unit.tiny_models import save_model

pytestmark = pytest.mark.numeric

OLD, NEW = PolicyVersion(0, 0), PolicyVersion(0, 1)


class Models:
    """The engine's model and another of the same family, as transformers knows them."""

    def __init__(self, folder: Path, family: str):
        self.path = folder / "old"
        self.old, self.new = (save_model(folder / name, family, seed) for seed, name in enumerate(("old", "new")))
        self.tensors = load_file(folder / "new" / "model.safetensors")
        self._engines: list[TorchRolloutEngine] = []

    def engine(self, slots: int) -> TorchRolloutEngine:
        engine = TorchRolloutEngine(
            str(self.path), device=torch.device("cpu"), dtype=torch.float32, slots=slots, max_model_len=256
        )
        self._engines.append(engine)
        return engine

    def close(self) -> None:
        for engine in self._engines:
            asyncio.run(engine.close())


@pytest.fixture(params=["qwen2"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    found = Models(tmp_path_factory.mktemp("models"), request.param)
    yield found
    found.close()


def versions(group: GeneratedGroup) -> list[list[int]]:
    """The steps of the versions of each sample's tokens, repetitions left out."""
    return [sorted({PolicyVersion.unpack(int(v)).step for v in each.versions}) for each in samples(group)]


# ---------------------------------------------------------------------------------------------- the engine


def swapped_midway(engine: TorchRolloutEngine, models: Models, requests: list[GroupRequest], recompute: bool) -> dict[int, Any]:
    """The samples by group when weights are swapped after nine steps."""

    async def session() -> dict[int, Any]:
        engine.submit(requests)
        checks = iter([False] * 9 + [True])
        done = await engine.advance(lambda: next(checks))
        await update(engine, models.tensors, NEW, recompute)
        done += [group async for group in drain(engine)]
        return {group.group_id: samples(group) for group in done}

    return asyncio.run(session())


def of_many_lengths() -> list[GroupRequest]:
    """The second group ends before the swap and leaves a hole; the last ones have no slot yet."""
    prompts = [range(20), (7,), range(1, 6), (9, 9), range(30, 43), (3, 1, 4)]
    limits = [30, 9, 25, 40, 17, 20]
    return [request(i, 2, tuple(prompt), limit) for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))]


@pytest.mark.parametrize("models", ["qwen2", "qwen3", "llama3_scaled", "gemma3", "gpt_oss"], indirect=True)
@pytest.mark.parametrize("together", [8192, 40])
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


def test_kept_sequences_go_on_with_the_keys_and_values_that_they_have(models: Models) -> None:
    """So the tokens after the swap are those of neither weights: what `recompute` is for."""
    requests = of_many_lengths()
    done = swapped_midway(models.engine(slots=9), models, requests, recompute=False)
    worst = 0.0
    for each in requests:
        for sample in done[each.group_id]:
            after = sample.versions == NEW.pack()
            if 0 < after.sum() < len(after):
                difference = np.abs(sample.logprobs - from_scratch(models.new, each.prompt, sample))[after]
                worst = max(worst, difference.max())
    assert worst > 0.1


def test_both_draw_the_same_tokens_before_the_swap_and_after_it_where_nothing_changed(models: Models) -> None:
    requests = of_many_lengths()
    models.tensors = load_file(models.path / "model.safetensors")
    kept, recomputed = (swapped_midway(models.engine(slots=9), models, requests, policy) for policy in (False, True))
    for group_id, expected in kept.items():
        assert [s.tokens.tolist() for s in recomputed[group_id]] == [s.tokens.tolist() for s in expected]


def test_a_held_engine_finishes_what_is_running_and_begins_nothing(models: Models) -> None:
    engine = models.engine(slots=3)

    async def session() -> dict[int, list[list[int]]]:
        engine.submit([request(0, n=2, limit=20), request(1, n=2, limit=30)])
        checks = iter([False] * 3 + [True])
        await engine.advance(lambda: next(checks))
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

    def __init__(self) -> None:
        self.adopted = False

    def adopt(self) -> None:
        self.adopted = True

    def release(self) -> None:
        """To be forgotten."""


class Desk:
    """A rollout service behind its actor, with weights staged; slots for three sequences."""

    def __init__(self, models: Models, in_flight: Any):
        publication = config.Publication(in_flight=in_flight)
        settings = config.Config(run=config.Run(name="test"), publication=publication)
        self.service = RolloutService(settings, "rollout-0", 0)
        self.engine = models.engine(slots=3)
        self.service.use(self.engine)
        self.stage = Stage()
        self._tensors = models.tensors
        self.service.weights.epoch, self.service.weights._received = 1, NEW
        staging = self.service.weights.staging
        staging._staged, staging._adopts = self.stage, True  # type: ignore[assignment]
        self.actor = self.service._actor

    def generate(self, *requests: GroupRequest) -> list[asyncio.Future[GeneratedGroup]]:
        return [self.actor.send(each) for each in requests]

    def commit(self) -> asyncio.Future[WeightsCommitted]:
        return self.actor.send(CommitWeights(NEW, 1), priority=Priority.CONTROL)

    @asynccontextmanager
    async def busy(self) -> AsyncIterator[list[asyncio.Future[GeneratedGroup]]]:
        """Yields three groups: two with all slots for a long time to come, and one that waits."""
        long = [request(group_id, n=n, limit=200) for group_id, n in ((1, 1), (2, 2), (3, 1))]
        async with running(self.actor):
            soon, *others = self.generate(request(0, n=1, limit=2), *long)
            await soon
            await self.engine.stage(self._tensors)
            yield others


def test_a_commit_swaps_at_once_where_samples_keep_or_recompute(models: Models) -> None:
    async def test(in_flight: str) -> None:
        desk = Desk(models, in_flight)
        async with desk.busy() as groups:
            await desk.commit()
            assert (desk.stage.adopted, desk.service.version) == (True, NEW)
            assert not any(group.done() for group in groups)
            assert [versions(await group) for group in groups] == [[[0, 1]], [[0, 1], [0, 1]], [[1]]]

    for in_flight in ("keep", "recompute"):
        run(test(in_flight))


def test_weights_that_would_never_fit_end_the_process_as_a_mistake(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another in its place would only find the same: exit code 2 ends the run."""

    async def test() -> None:
        desk, ended = Desk(models, "keep"), asyncio.get_running_loop().create_future()

        async def swap(version: PolicyVersion, recompute: bool = False) -> None:
            raise UserError("model.path: these are other weights")

        monkeypatch.setattr(desk.engine, "swap", swap)
        monkeypatch.setattr("runtime.process.os_process.end_at_once", lambda *told: ended.set_result(told))
        async with desk.busy():
            commit = desk.commit()
            assert await ended == ("model.path: these are other weights", 2)
            assert not commit.done()  # or the coordinator might end it first, and have it started again

    run(test())


def test_recompute_reaches_the_engine(models: Models) -> None:
    async def test() -> None:
        desk = Desk(models, "recompute")
        async with desk.busy() as groups:
            await desk.commit()
            (sample,) = samples(await groups[0])
        after = sample.versions == NEW.pack()
        expected = from_scratch(models.new, request(1).prompt, sample)
        assert_close(sample.logprobs[after], expected[after], terms=forward_terms(256), scale=LOGITS)

    run(test())


def test_a_draining_commit_waits_for_what_is_running_alone(models: Models) -> None:
    async def test() -> None:
        desk = Desk(models, "drain")
        async with desk.busy() as (first, second, waiting):
            committing = desk.commit()
            late = desk.generate(request(4, n=1, limit=3))[0]  # short, but not begun when the commit came
            assert (await committing).pause_seconds > 0
            assert first.done()
            assert second.done()
            assert not waiting.done()
            assert not late.done()
            assert (desk.stage.adopted, desk.service.version) == (True, NEW)
            found = [versions(await group) for group in (first, second, waiting, late)]
            assert found == [[[0]], [[0], [0]], [[1]], [[1]]]

    run(test())


def test_a_draining_commit_does_not_wait_where_nothing_is_running(models: Models) -> None:
    async def test() -> None:
        desk = Desk(models, "drain")
        async with running(desk.actor):
            await desk.engine.stage(models.tensors)
            await desk.commit()
            assert desk.service.version == NEW

    run(test())


def test_groups_that_are_cancelled_are_not_waited_for(models: Models) -> None:
    async def test() -> None:
        desk = Desk(models, "drain")
        async with desk.busy() as (first, second, waiting):
            committing = desk.commit()
            first.cancel()
            second.cancel()
            await committing
            assert desk.engine.stats().decode_steps < 200
            assert versions(await waiting) == [[1]]

    run(test())


def test_what_is_withdrawn_ends_though_nothing_else_is_asked(models: Models) -> None:
    async def test() -> None:
        desk = Desk(models, "keep")
        async with desk.busy() as groups:
            for group in groups:
                group.cancel()
            while desk.service.busy:  # noqa: ASYNC110 - of what is withdrawn there is no answer
                await asyncio.sleep(0)
            assert desk.engine.stats().running == 0
            assert desk.engine.stats().decode_steps < 200

    run(test())


def test_a_draining_commit_that_nobody_waits_for_any_more_is_given_up(models: Models) -> None:
    """As when its deadline has passed: the weights stay, and the groups that waited for it go on."""

    async def test() -> None:
        desk = Desk(models, "drain")
        async with desk.busy() as groups:
            committing = desk.commit()
            await desk.actor.send(AbortWeights(NEW, 9), priority=Priority.CONTROL)  # behind it: the commit was taken in
            committing.cancel()
            assert [versions(await group) for group in groups] == [[[0]], [[0], [0]], [[0]]]
            assert desk.service.version == OLD

    run(test())


def test_an_abort_ends_a_draining_commit(models: Models) -> None:
    async def test() -> None:
        desk = Desk(models, "drain")
        async with desk.busy() as groups:
            committing = desk.commit()
            await desk.actor.send(AbortWeights(NEW, 1), priority=Priority.CONTROL)
            with pytest.raises(ServiceFault, match="rollout-0: commit: was aborted while sequences were still running"):
                await committing
            assert [versions(await group) for group in groups] == [[[0]], [[0], [0]], [[0]]]

    run(test())
