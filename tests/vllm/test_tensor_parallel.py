"""Two workers that share each layer: the same log-probabilities, before and after updates, in flight too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from runtime.config import RolloutParallel
from runtime.errors import InvariantViolated, ServiceFault
from runtime.types import PolicyVersion
from runtime.weights.group import arena
from tests.vllm.faulty_worker import BREAKS
from tests.vllm.rig import SLOTS, Rig

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def rig(model_path: Path) -> Iterator[Rig]:
    with Rig(model_path, parallel=RolloutParallel(tensor=2)) as made:
        yield made


def test_log_probabilities_are_the_trainers_before_and_after_updates(rig: Rig) -> None:
    for _ in range(4):
        (samples,) = rig.generate(rig.request())
        rig.check_exact(samples)
        rig.run(rig.update())


def test_recompute_in_flight_is_exact_at_the_boundary(rig: Rig) -> None:
    rig.begin(rig.request(n=SLOTS, tokens=60), tokens=300)
    rig.run(rig.update(recompute=True))
    payload = rig.finish_one()
    rig.check_exact(payload.samples)
    assert sum(len(set(sample.versions.tolist())) == 2 for sample in payload.samples) >= SLOTS // 2


def test_a_version_in_parts_is_exact_also_after_one_that_was_given_up(rig: Rig) -> None:
    """Each part lies in the memory of the one before. The biases of queries, keys and values come apart from their weights."""
    (memory,) = arena([1 << 20])

    async def load(tensors: dict[str, torch.Tensor], parts: int, given: int) -> None:
        names = sorted(tensors, key=lambda name: tensors[name].ndim < 2)
        for number in range(given):
            end, part = 0, {}
            for name in names[number::parts]:
                part[name] = memory[end:][: tensors[name].nbytes].view(tensors[name].dtype).view(tensors[name].shape)
                part[name].copy_(tensors[name])
                end += tensors[name].nbytes
            await rig.engine.load(part, number == 0, number == parts - 1)
            memory.fill_(255)

    rig.run(load(rig.next_weights(), 5, 3))
    assert rig.engine.torn
    with pytest.raises(InvariantViolated, match="must be staged"):
        rig.run(rig.engine.swap(PolicyVersion(0, rig.newest)))
    rig.run(load(rig.next_weights(), 5, 5))
    rig.run(rig.engine.swap(PolicyVersion(0, rig.newest)))
    (samples,) = rig.generate(rig.request())
    rig.check_exact(samples)
    rig.run(rig.update())
    rig.check_exact(rig.generate(rig.request(n=2))[0])


def test_workers_that_fail_are_one_named_error_and_recover(rig: Rig) -> None:
    tensors = {name: tensor.clone() for name, tensor in rig.models[rig.newest].state_dict().items()}
    tensors["model.layers.1.self_attn.q_proj.weight"].view(-1)[0] = BREAKS
    with pytest.raises(ServiceFault, match=r"swap: version 9\.9 was not loaded: .*injected fault at model\.layers\.1"):
        rig.run(rig.swap(tensors, PolicyVersion(9, 9)))
    rig.run(rig.update())
    rig.check_exact(rig.generate(rig.request(n=2))[0])


def test_it_sleeps_and_wakes(rig: Rig) -> None:
    rig.run(rig.engine.sleep())
    rig.engine.submit([rig.request(n=1)])
    assert not rig.engine.has_work
    rig.run(rig.engine.wake())
    payload = rig.finish_one()
    rig.check_exact(payload.samples)


def test_weights_are_swapped_before_the_cache_is_back(rig: Rig) -> None:
    rig.run(rig.engine.sleep())
    with pytest.raises(InvariantViolated, match="asleep"):
        rig.run(rig.engine.swap(PolicyVersion(0, 99)))
    rig.run(rig.engine.wake(cache=False))
    rig.run(rig.update())
    rig.engine.submit([rig.request(n=1)])
    assert not rig.engine.has_work
    rig.run(rig.engine.wake())
    payload = rig.finish_one()
    rig.check_exact(payload.samples)
    assert set(payload.samples[0].versions.tolist()) == {rig.engine.version.pack()}


def test_what_runs_as_it_goes_to_sleep_goes_on_with_the_next_weights(rig: Rig) -> None:
    rig.begin(rig.request(n=SLOTS, tokens=60), tokens=300)
    rig.run(rig.engine.sleep())
    assert not rig.engine.has_work
    rig.run(rig.engine.wake(cache=False))
    rig.run(rig.update())
    rig.run(rig.engine.wake())
    payload = rig.finish_one()
    rig.check_exact(payload.samples)
    assert sum(len(set(sample.versions.tolist())) == 2 for sample in payload.samples) >= SLOTS // 2
