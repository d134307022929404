"""Two ranks over real gloo do what one rank does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from runtime.trainer.fsdp import sharding
from runtime.trainer.step import ModelTrainer, policy_trainer
from runtime.types import StepResult, TrainGroup
from tests.loopback.ranks import run_two
from tests.unit.training_cases import VOCAB, make_config, make_episodes, make_groups, make_policy
from tests.unit.training_steps import assert_metrics, assert_updated, make_probes

pytestmark = pytest.mark.numeric

STEPS = 3
# Advantages that need sums over the batch, each of them of all ranks.
BATCH_WIDE = (
    {"advantage": "reinforce_plus_plus", "kl": "k1", "kl_placement": "reward", "kl_coefficient": 0.1},
    {"advantage": "reinforce_plus_plus_baseline", "loss": "ppo", "correction": "sequence_tis"},
    {"advantage": "group_norm", "group_std": "batch"},
    {"advantage": "gpg", "loss": "gpg"},
    # What is chosen among the tokens of all ranks.
    {"loss": "clip_cov", "covariance_share": 0.3, "covariance_low": 0.0},
    {"loss": "kl_cov", "covariance_share": 0.3},
)
SECTIONS = {
    "algorithm": {"kl_coefficient": 0.1, "entropy_coefficient": 0.01},
    "optimizer": {"eps": 1e-2, "max_grad_norm": 0.5},
    "training": {"max_tokens_per_microbatch": 24},  # so that ranks have unequal numbers of micro-batches
}


def step_groups(step: int) -> list[TrainGroup]:
    return make_groups(step, step=step)


def run_step(engine: ModelTrainer, calls: Sequence[list[TrainGroup]]) -> StepResult:
    engine.begin_step(engine.step)
    for groups in calls:
        engine.accumulate(groups)
    probes = {f"probe-{index}": gap for index, gap in enumerate(engine.compare(make_probes(engine.step)))}
    result = engine.apply()
    del result.metrics["padding_waste"]  # which depends on the packing alone
    result.metrics.update(probes)  # of rank 0
    return result


def flat_weights(engine: ModelTrainer, rank: int) -> torch.Tensor:
    parts = [tensor.flatten().float() for tensor in engine.backend.gather()]
    return torch.cat(parts) if rank == 0 else torch.empty(0)


def assert_trained(found: torch.Tensor, engine: ModelTrainer) -> None:
    """`found` are its weights after STEPS steps, but for rounding."""
    options = engine._config.training.optimizer
    assert_updated({"weights": found}, {"weights": flat_weights(engine, 0)}, options, steps=STEPS)


def uniform(groups: list[TrainGroup]) -> list[TrainGroup]:
    for group in groups:
        group.rewards[:] = 1.0
    return groups


def many_groups(step: int) -> list[TrainGroup]:
    return make_groups(100 + step, (5, 4, 6, 3, 2), step=step, longest=20)


def many_episodes(step: int) -> list[TrainGroup]:
    return make_episodes(200 + step, (3, 4, 5, 2, 2), step=step, turns=True)


# A streamable algorithm, and one that waits for the whole batch, each under the budgets of the two ranks and of the single one;
# and what is trained on.
UNEVEN = (
    ({"kl_coefficient": 0.1, "loss": "ppo", "aggregation": "seq_mean_token_mean"}, (1, 60), 8192, many_groups),
    ({"advantage": "reinforce_plus_plus_baseline", "loss": "ppo", "kl_coefficient": 0.1}, (8192, 20), 1, many_groups),
    # Masked samples count, and no rank's filler.
    ({"aggregation": "dr_grpo", "entropy_coefficient": 0.01}, (60, 1), 8192, many_groups),
    ({"aggregation": "episode_mean_token_mean", "kl_coefficient": 0.1, "turn_discount": 0.9}, (60, 1), 8192, many_episodes),
    ({"advantage": "group_norm", "group_std": "batch", "aggregation": "dr_grpo"}, (1, 8192), 60, many_episodes),
    ({"advantage": "none", "kl": "k1", "kl_placement": "advantage", "kl_coefficient": 1.0}, (1, 60), 8192, many_groups),
)


def with_budget(algorithm: dict, budget: int) -> dict:
    return SECTIONS | {"algorithm": algorithm, "training": {"max_tokens_per_microbatch": budget}}


def uneven_steps(policy: str, rank: int) -> tuple[list[list[dict[str, float]]], list[torch.Tensor]]:
    """Metrics and weights of each case of UNEVEN: nearly all samples go to one rank, then to the other, then all to one."""
    metrics, weights = [], []
    for algorithm, budgets, _, make in UNEVEN:
        config = make_config(policy, **with_budget(algorithm, budgets[rank]))
        engine = policy_trainer(config, rank=rank, world_size=2, device="cpu")
        steps = []
        for step in range(STEPS):
            groups = make(step)
            few, many = groups[4:], groups[:4]
            shares = ([many[:3], many[3:]], [few, []]), ([[], few], [many[2:], many[:2]]), ([[]], [groups])
            steps.append(run_step(engine, shares[step][rank]).metrics)
        metrics.append(steps)
        weights.append(flat_weights(engine, rank))
    return metrics, weights


def steps_of(engine: ModelTrainer, rank: int) -> list[dict[str, float]]:
    results = []
    for step in range(STEPS):
        groups = step_groups(step)
        calls = [groups[:1], groups[2:]] if rank == 0 else [groups[1:2], []]
        results.append(run_step(engine, calls).metrics)
    return results


def lent_steps(policy: str, rank: int) -> tuple[int, list[dict[str, float]]]:
    """Of a trainer that gives its device up before each step, as if the CPU were an accelerator; and what it did not give back,
    in bytes."""
    engine = policy_trainer(make_config(policy, **SECTIONS), rank=rank, world_size=2, device="cpu")
    backend: Any = engine.backend
    backend.offloaded = ("optimizer", "param")
    kept, begin = 0, engine.begin_step

    def begin_step(step: int) -> None:
        nonlocal kept
        engine.offload()
        shards = [sharding.local(parameter) for parameter in backend.model.parameters()]
        moments = [sharding.local(state["exp_avg"]) for state in backend.optimizer.state.values()]
        kept += sum(tensor.untyped_storage().nbytes() for tensor in shards + moments)
        engine.onload()
        begin(step)

    with mock.patch.object(engine, "begin_step", begin_step):
        results = steps_of(engine, rank)
    return kept, results


def averaging_engine(policy: str, rank: int) -> ModelTrainer:
    """On an FSDP2 as torch 2.7 has it, which can only average. It stays so in this process."""
    from torch.distributed.fsdp import FSDPModule

    del FSDPModule.set_gradient_divide_factor, FSDPModule.set_force_sum_reduction_for_comms
    return policy_trainer(make_config(policy, **SECTIONS), rank=rank, world_size=2, device="cpu")


def two_ranks(rank: int, folder: Path) -> None:
    """What each of the two processes runs; rank 0 writes its results to `folder`."""
    policy = str(folder / "policy")
    # The first of this process, since torch keeps meshes.
    with mock.patch("torch.cuda.is_available", return_value=True):
        beside_cuda = policy_trainer(make_config(policy), rank=rank, world_size=2, device="cpu")
    of_mesh = next(iter(beside_cuda.backend.parameters.values())).device_mesh.get_group().group_name  # type: ignore[attr-defined]
    engine = policy_trainer(make_config(policy, **SECTIONS), rank=rank, world_size=2, device="cpu")
    with mock.patch("runtime.trainer.head.CPU_CHUNK_ELEMENTS", 5 * VOCAB):  # what one rank computes in one chunk
        results = steps_of(engine, rank)
        lent, of_lent = lent_steps(policy, rank)
    save = folder / "saved-by-two"
    engine.save(str(save))
    weights = flat_weights(engine, rank)
    engine.backend.export(folder / "export")
    engine.load(str(folder / "saved-by-one"))
    loaded = flat_weights(engine, rank)
    resumed = run_step(engine, [step_groups(STEPS)] if rank == 0 else [[]]).metrics

    # Without a gradient no backward pass follows the forward one; the next step must not see the weights of before.
    plain = policy_trainer(make_config(policy, optimizer=SECTIONS["optimizer"]), rank=rank, world_size=2, device="cpu")
    forward_only = [run_step(plain, [make]).metrics for make in (step_groups(0), uniform(step_groups(1)), step_groups(2))]
    batch_wide = []
    for algorithm in BATCH_WIDE:
        whole = policy_trainer(
            make_config(policy, **SECTIONS | {"algorithm": algorithm}), rank=rank, world_size=2, device="cpu"
        )
        for step in range(2):
            groups = step_groups(step)
            # The second rank's share comes late and in parts, or there is none.
            calls = ([groups[:1], groups[2:]] if step else [groups]) if rank == 0 else ([[], groups[1:2]] if step else [])
            batch_wide.append(run_step(whole, calls).metrics)
    uneven, uneven_weights = uneven_steps(policy, rank)
    averaging = averaging_engine(policy, rank)
    averaged = steps_of(averaging, rank)
    averaged_weights = flat_weights(averaging, rank)
    if rank == 0:
        kept = {"weights": weights, "averaged": averaged_weights, "loaded": loaded, "uneven": torch.stack(uneven_weights)}
        torch.save(kept, folder / "tensors.pt")
        everything = {"steps": results, "resumed": resumed, "forward_only": forward_only, "batch_wide": batch_wide}
        everything |= {
            "uneven": uneven,
            "lent": of_lent,
            "kept": lent,
            "averaged": averaged,
            "of_mesh": [of_mesh, dist.group.WORLD.group_name],
        }
        (folder / "results.json").write_text(json.dumps(everything))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two ranks have run, beside a checkpoint of one rank that they loaded."""
    folder = tmp_path_factory.mktemp("fsdp")
    for name in ("policy", "saved-by-one", "saved-by-two", "export"):
        (folder / name).mkdir()
    make_policy(folder / "policy")
    one_rank(folder).save(str(folder / "saved-by-one"))
    run_two(two_ranks, folder)
    return folder


def one_rank(folder: Path, steps: int = STEPS) -> ModelTrainer:
    engine = policy_trainer(make_config(str(folder / "policy"), **SECTIONS))
    for step in range(steps):
        run_step(engine, [step_groups(step)])
    return engine


@pytest.fixture(scope="module")
def results(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())


@pytest.fixture(scope="module")
def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "tensors.pt", weights_only=True)


def test_steps_are_those_of_one_rank(folder: Path, results: dict, tensors: dict[str, torch.Tensor]):
    engine = one_rank(folder, 0)
    for step in range(STEPS):
        expected = run_step(engine, [step_groups(step)]).metrics
        assert_metrics(results["steps"][step], expected, steps=step + 1)
    assert_trained(tensors["weights"], engine)


def test_an_fsdp2_that_only_averages_gives_the_same(folder: Path, results: dict, tensors: dict[str, torch.Tensor]):
    for step, (averaged, summed) in enumerate(zip(results["averaged"], results["steps"], strict=True)):
        assert_metrics(averaged, summed, steps=step + 1)
    assert_trained(tensors["averaged"], one_rank(folder))


def test_shards_meet_in_the_ranks_own_group_where_torch_sees_cuda_beside_gloo(results: dict):
    of_mesh, own = results["of_mesh"]
    assert of_mesh == own


def test_shards_that_were_on_the_host_between_steps_are_the_same(results: dict):
    assert results["lent"] == results["steps"]
    assert results["kept"] == 0


def test_a_checkpoint_of_one_rank_is_loaded_by_two(folder: Path, results: dict, tensors: dict[str, torch.Tensor]):
    engine = one_rank(folder)
    assert torch.equal(tensors["loaded"], flat_weights(engine, 0))
    assert_metrics(results["resumed"], run_step(engine, [step_groups(STEPS)]).metrics)


def test_a_checkpoint_of_two_ranks_is_loaded_by_one(folder: Path, tensors: dict[str, torch.Tensor]):
    engine = one_rank(folder, 0)
    engine.load(str(folder / "saved-by-two"))
    assert engine.step == STEPS
    assert torch.equal(flat_weights(engine, 0), tensors["weights"])
    expected = run_step(one_rank(folder), [step_groups(STEPS)]).metrics
    assert_metrics(run_step(engine, [step_groups(STEPS)]).metrics, expected, steps=STEPS + 1)


def test_export_of_two_ranks_holds_the_whole_policy(folder: Path, tensors: dict[str, torch.Tensor]):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "export")
    assert torch.equal(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]), tensors["weights"])


def test_a_step_without_gradient_leaves_nothing_stale(folder: Path, results: dict):
    engine = policy_trainer(make_config(str(folder / "policy"), optimizer=SECTIONS["optimizer"]))
    three = step_groups(0), uniform(step_groups(1)), step_groups(2)
    for step, (got, groups) in enumerate(zip(results["forward_only"], three, strict=True)):
        # Both ranks trained on the same groups: sums double, means stay.
        expected = run_step(engine, [groups, groups]).metrics
        assert_metrics(got, expected, steps=step + 1)


def test_batch_wide_advantages_are_over_all_ranks(folder: Path, results: dict):
    got = iter(results["batch_wide"])
    for algorithm in BATCH_WIDE:
        engine = policy_trainer(make_config(str(folder / "policy"), **SECTIONS | {"algorithm": algorithm}))
        for step in range(2):
            expected = run_step(engine, [step_groups(step)]).metrics
            assert expected["actor/grad_norm"] > 0
            assert_metrics(next(got), expected, steps=step + 1)


@pytest.mark.parametrize(
    "case",
    range(len(UNEVEN)),
    ids=["streamable", "whole batch", "masked samples", "episodes", "episodes whole", "distillation"],
)
def test_budgets_and_shares_have_no_say(folder: Path, results: dict, tensors: dict[str, torch.Tensor], case: int):
    algorithm, _, budget, make = UNEVEN[case]
    engine = policy_trainer(make_config(str(folder / "policy"), **with_budget(algorithm, budget)))
    for step in range(STEPS):
        expected = run_step(engine, [make(step)]).metrics
        assert expected["actor/grad_norm"] > 0
        assert_metrics(results["uneven"][case][step], expected, steps=step + 1)
    assert_trained(tensors["uneven"][case], engine)
