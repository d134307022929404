"""How far rollout and trainer are apart, against float64, with the same weights and others; tensors that nothing has read."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from runtime import types
from runtime.config import Mismatch
from runtime.errors import InvalidMessage
from runtime.rollout.torch.engine import TorchRolloutEngine
from runtime.rollout.vllm.worker import Reads, undelivered
from runtime.trainer.backend import StepStatistics
from runtime.trainer.objective import add_mismatch
from runtime.trainer.step import ModelTrainer, policy_trainer
from runtime.types import GroupPayload, GroupRequest, PolicyVersion
from tests.unit.lora_cases import LORA, lora_config
from tests.unit.rollout_cases import drain, never, request, update
from tests.unit.training_cases import VOCAB, make_config, make_groups, make_policy
from tests.unit.training_steps import published, run_step, weights

CPU = torch.device("cpu")
Make = Callable[..., TorchRolloutEngine]
LIMIT = Mismatch().limit


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def rollout(policy: str) -> Iterator[Make]:
    engines = []

    def make(dtype: torch.dtype = torch.float32, slots: int = 4) -> TorchRolloutEngine:
        engines.append(TorchRolloutEngine(policy, device=CPU, dtype=dtype, slots=slots, max_model_len=64))
        return engines[-1]

    yield make
    for engine in engines:
        asyncio.run(engine.close())


def probe_request(group_id: int = -1, limit: int = 8) -> GroupRequest:
    return replace(request(group_id, n=1, prompt=(5, 9, 2, 41, 7), limit=limit), purpose="probe")


def probe(engine: TorchRolloutEngine, group_id: int = -1) -> bytes:
    async def asked() -> bytes:
        engine.submit([probe_request(group_id)])
        (group,) = [group async for group in drain(engine)]
        return group.payload

    return asyncio.run(asked())


def figures(gaps: np.ndarray) -> dict[str, float]:
    """Of sampled minus trained log-probabilities, float64: log q(x) / p(x) where q samples. k1 = log q/p and
    k3 = (p/q − 1) − log p/q are Schulman's estimates of KL(q || p)."""
    ratio = np.exp(-gaps)
    far, size = np.abs(gaps), float(len(gaps))
    k3 = float((ratio - 1 - np.log(ratio)).mean())
    found = {"abs_logprob": float(far.mean()), "k1": float(gaps.mean()), "k3": k3, "over_0.1": float((far > 0.1).mean())}
    return {f"mismatch/{name}": value for name, value in (found | {"max": float(far.max()), "tokens": size}).items()}


def test_the_figures_are_those_of_float64() -> None:
    rng = np.random.default_rng(5)
    sampled = rng.normal(-2.0, 1.0, (40, 25))
    trained = sampled + rng.normal(0.0, 0.1, sampled.shape)
    counted = rng.random(sampled.shape) < 0.6
    statistics = StepStatistics(CPU)
    for rows in (slice(0, 13), slice(13, 40)):
        add_mismatch(statistics, *(torch.tensor(part[rows], dtype=torch.float32) for part in (sampled, trained, counted)))
    found = statistics.reduce(1).metrics()
    gaps = (sampled - trained)[counted]
    tail = found.pop("mismatch/abs_logprob_p99")
    # A difference of two float32 of size 8 is off by 2^-21 at most, and so is each mean of them; k3 of 0.1 is a tenth of x.
    assert found == {name: pytest.approx(value, rel=1e-4, abs=2**-20) for name, value in figures(gaps).items()}
    exact = np.sort(np.abs(gaps))[math.ceil(0.99 * len(gaps)) - 1]
    assert exact * 2 ** (-1 / 16) * 0.9999 <= tail <= exact * 1.0001


def test_a_probe_is_compared_under_the_weights_before_the_update(policy: str, rollout: Make) -> None:
    """The reply and its log-probabilities are moved by known amounts: so the gaps are known, but for what float32 rounds."""
    engine, groups = policy_trainer(make_config(policy)), make_groups(3, step=0)
    alone = run_step(policy_trainer(make_config(policy)), groups).metrics
    moves = [np.array([0.25, -0.05, 0.0, 0.5]), np.array([-1.0])]
    probes = []
    for index, moved in enumerate(moves):
        payload = types.decode(GroupPayload, probe(rollout(), -1 - index))
        (sample,) = payload.samples
        payload.logprobs = sample.logprobs + np.resize(moved, len(sample.tokens)).astype(np.float32)
        probes.append(types.encode(payload))
    size = len(sample.tokens)
    gaps = [np.resize(moved, size) for moved in moves]

    engine.begin_step(0)
    engine.accumulate(groups, last=True)
    assert engine.compare(probes) == pytest.approx([np.abs(gap).mean() for gap in gaps], abs=1e-5)
    metrics = engine.apply().metrics
    fresh, total = alone["mismatch/tokens"], alone["mismatch/tokens"] + 2 * size
    assert metrics["mismatch/tokens"] == total
    assert metrics["mismatch/tokens_of_other_versions"] == alone["mismatch/tokens_of_other_versions"]
    probed = figures(np.concatenate(gaps))
    for name in ("abs_logprob", "k1", "k3", "over_0.1"):
        joined = (alone[f"mismatch/{name}"] * fresh + probed[f"mismatch/{name}"] * 2 * size) / total
        assert metrics[f"mismatch/{name}"] == pytest.approx(joined, rel=1e-4, abs=1e-5), name
    # The update is the same: a comparison leaves no gradient.
    for name in ("actor/grad_norm", "actor/pg_loss"):
        assert metrics[name] == alone[name]


def test_a_step_whose_tokens_are_all_older_is_measured_by_its_probe(policy: str, rollout: Make) -> None:
    engine, generator = policy_trainer(make_config(policy)), rollout()
    run_step(engine, make_groups(3))
    asyncio.run(update(generator, weights(engine), PolicyVersion(0, 1)))
    engine.begin_step(1)
    engine.accumulate(make_groups(3), last=True)  # all of version 0
    (gap,) = engine.compare([probe(generator)])
    metrics = engine.apply().metrics
    assert metrics["mismatch/tokens"] == 8
    assert metrics["mismatch/abs_logprob"] == pytest.approx(gap)
    assert 0 <= gap < 1e-5


@pytest.mark.parametrize("updates", [1, 2])
def test_several_updates_are_compared_before_the_first(policy: str, rollout: Make, updates: int) -> None:
    training = {"groups_per_step": 2, "epochs": 2, "mini_batch_size": 2 // updates}
    engine = policy_trainer(make_config(policy, training=training, optimizer={"learning_rate": 0.1}))
    engine.begin_step(0)
    engine.accumulate(make_groups(3, (4, 4), step=2), last=True)  # none of version 0
    (gap,) = engine.compare([probe(rollout())])
    assert gap < 1e-5
    assert engine.apply().metrics["mismatch/abs_logprob"] < 1e-5


def learned(engine: ModelTrainer) -> ModelTrainer:
    """After steps by which it has moved far."""
    for _ in range(12):
        run_step(engine, make_groups(3))
    return engine


def test_weights_that_did_not_arrive_are_over_the_limit_and_those_that_did_far_below(policy: str, rollout: Make) -> None:
    engine = learned(policy_trainer(make_config(policy, optimizer={"learning_rate": 1e-2})))
    stale, good, rounded = rollout(), rollout(), rollout(torch.bfloat16)
    for one in (good, rounded):
        asyncio.run(update(one, weights(engine), PolicyVersion(0, 12)))
    engine.begin_step(12)
    gaps = engine.compare([probe(one, -index) for index, one in enumerate((stale, good, rounded), 1)])
    assert gaps[0] > LIMIT > gaps[2] > gaps[1]
    assert gaps[1] < 1e-4


def test_adapters_that_did_not_arrive_are_over_the_limit(policy: str, rollout: Make) -> None:
    engine = learned(policy_trainer(lora_config(policy, LORA)))
    stale, alone, merged = rollout(), rollout(), rollout()
    asyncio.run(update(alone, published(engine), PolicyVersion(0, 12)))
    asyncio.run(update(merged, weights(engine), PolicyVersion(0, 12)))
    engine.begin_step(12)
    gaps = engine.compare([probe(one, -index) for index, one in enumerate((stale, alone, merged), 1)])
    assert gaps[0] > LIMIT
    assert max(gaps[1:]) < 1e-4


def test_a_probe_that_is_none_is_refused_and_changes_nothing(policy: str, rollout: Make) -> None:
    engine = policy_trainer(make_config(policy))
    payload = types.decode(GroupPayload, probe(rollout()))
    payload.tokens = payload.tokens + np.int32(VOCAB)
    engine.begin_step(0)
    for broken in (types.encode(payload), b"\x93 no group"):
        with pytest.raises(InvalidMessage):
            engine.compare([broken])


def test_a_probe_goes_into_a_slot_of_its_own_before_all_that_wait(rollout: Make) -> None:
    async def asked() -> list[Any]:
        engine, ended = rollout(slots=2), list[int]()
        engine.submit([request(1, n=2, limit=40), request(2, n=2, limit=40)])
        steps = iter(range(3))
        await engine.advance(lambda: next(steps, None) is None)
        engine.submit([probe_request(-7)])
        while engine.has_work:
            ended += [group.group_id for group in await engine.advance(never)]
        return ended

    ended = asyncio.run(asked())
    assert ended[0] == -7 and sorted(ended[1:]) == [1, 2]


def test_without_a_probe_no_more_samples_run_than_there_are_slots(rollout: Make) -> None:
    async def most() -> int:
        engine, running = rollout(slots=2), [0]
        engine.submit([request(index, n=3) for index in range(4)])

        def looked() -> bool:
            running.append(engine.stats().running)
            return False

        while engine.has_work:
            await engine.advance(looked)
        return max(running)

    assert asyncio.run(most()) == 2


# ------------------------------------------------------------------------------------------------------- what was given to load
BUFFER = torch.arange(40.0)  # which they all lie in, as those of a weight sync do


def given_weights() -> Iterator[tuple[str, torch.Tensor]]:
    for index, name in enumerate("abcd"):
        yield name, BUFFER[10 * index : 10 * index + 10].view(2, 5)
    yield "head", BUFFER[:10].view(2, 5)  # tied to a
    yield "empty", BUFFER[:0]


Loads = Callable[[Iterator[tuple[str, torch.Tensor]]], object]


def all_but_c(given: Iterator[tuple[str, torch.Tensor]]) -> object:
    return [torch.zeros_like(tensor).copy_(tensor) for name, tensor in given if name != "c"]


def parts(given: Iterator[tuple[str, torch.Tensor]]) -> object:
    return [torch.zeros(5).copy_(tensor[1]) for name, tensor in given if name in "bc"]


def put_off(given: Iterator[tuple[str, torch.Tensor]]) -> object:
    kept = dict(given)
    return torch.stack([kept["a"], kept["d"]])


def only_shapes(given: Iterator[tuple[str, torch.Tensor]]) -> object:
    return [(tensor.shape, tensor.dtype) for _, tensor in given]


@pytest.mark.parametrize(("load", "left"), [(all_but_c, "c"), (parts, "ad"), (put_off, "bc"), (only_shapes, "abcd")])
def test_what_nothing_has_read_is_left(load: Loads, left: str) -> None:
    with Reads() as reads:
        load(reads.of(given_weights()))
    assert [name for name, _ in reads.left.values()] == list(left)


def test_what_is_not_delivered_is_told_by_name() -> None:
    assert not undelivered([], [])
    assert "2 published weights have no place in it: a, b; 1 of its parameters get none: c; " in undelivered(["a", "b"], ["c"])
