"""The embedded engine put to sleep: its memory of keys and values is given back, and generation goes on after it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from runtime.errors import InvariantViolated
from runtime.rollout.torch.engine import TorchRolloutEngine
from runtime.types import GeneratedGroup, PolicyVersion
from tests.unit.rollout_cases import drain, never, request
from tests.unit.tiny_models import save_model


def test_sleep_gives_the_cache_back_and_loses_no_group(tmp_path: Path) -> None:
    save_model(tmp_path)
    engine = TorchRolloutEngine(str(tmp_path), device=torch.device("cpu"), dtype=torch.float32, slots=2, max_model_len=64)

    async def go() -> list[GeneratedGroup]:
        engine.submit([request(1)])
        plain = [group async for group in drain(engine)]
        engine.submit([request(2)])
        assert await engine.advance(iter([False, True]).__next__) == []
        again = [group async for group in drain(engine)]
        assert [group.group_id for group in again] == [2]
        await engine.sleep()
        assert engine._cache.data.untyped_storage().nbytes() == 0
        engine.submit([request(1)])
        assert not engine.has_work
        assert await engine.advance(never) == []
        with pytest.raises(InvariantViolated, match="asleep"):
            await engine.swap(PolicyVersion(0, 1))
        await engine.wake()
        after = [group async for group in drain(engine)]
        assert after == plain
        await engine.close()
        return after

    assert len(asyncio.run(go())) == 1


@pytest.mark.parametrize("on_host", [True, False])
def test_weights_are_taken_over_before_the_cache_is_back(tmp_path: Path, on_host: bool) -> None:
    """`on_host`: as on an accelerator, weights that are given back are kept on the host."""
    weights = {seed: save_model(tmp_path / str(seed), seed=seed).state_dict() for seed in (0, 1)}
    folder = str(tmp_path / "0")
    engine = TorchRolloutEngine(folder, device=torch.device("cpu"), dtype=torch.float32, slots=2, max_model_len=64)
    engine.adopts = engine._next.adopts = "" if on_host else "float32"

    async def go() -> None:
        before = [tensor.clone() for tensor in engine._decoder.weights.tensors()]
        await engine.sleep()
        embedding = engine._decoder.weights.embedding
        assert (embedding.untyped_storage().nbytes() == 0) == on_host
        await engine.wake(cache=False)
        assert all(map(torch.equal, before, engine._decoder.weights.tensors()))
        engine.submit([request(1)])
        assert not engine.has_work
        await engine.stage(weights[1])
        await engine.swap(PolicyVersion(0, 1))
        assert not engine.has_work
        await engine.sleep()
        await engine.wake()
        (group,) = [group async for group in drain(engine)]
        assert group.oldest == PolicyVersion(0, 1)
        assert torch.equal(engine._decoder.weights.embedding, weights[1]["model.embed_tokens.weight"])
        await engine.close()

    asyncio.run(go())


def test_what_runs_as_it_goes_to_sleep_goes_on_with_the_next_weights(tmp_path: Path) -> None:
    """Bit for bit as where the keys and values are made anew at the swap, and nothing sleeps."""
    other = save_model(tmp_path / "other", seed=1).state_dict()
    save_model(tmp_path / "first", seed=0)

    async def generated(sleeps: bool) -> list[GeneratedGroup]:
        engine = TorchRolloutEngine(
            str(tmp_path / "first"), device=torch.device("cpu"), dtype=torch.float32, slots=2, max_model_len=64
        )
        engine.submit([request(1), request(2)])
        assert await engine.advance(iter([False, False, False, True]).__next__) == []
        assert engine.stats().running
        if sleeps:
            await engine.sleep()
            assert engine._cache.data.untyped_storage().nbytes() == 0
            assert not engine.has_work
            await engine.wake(cache=False)
        await engine.stage(other)
        await engine.swap(PolicyVersion(0, 1), recompute=not sleeps)
        if sleeps:
            await engine.wake()
        groups = [group async for group in drain(engine)]
        await engine.close()
        return groups

    plain, slept = (asyncio.run(generated(sleeps)) for sleeps in (False, True))
    assert slept == plain
    assert {(group.oldest.step, group.newest.step) for group in slept} == {(0, 1), (1, 1)}
