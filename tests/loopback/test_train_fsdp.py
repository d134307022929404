"""Two ranks over real gloo do what one rank does: in one start of both, each case is trained, saved, loaded and exported."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from peft import PeftModel
from transformers import AutoModelForCausalLM

from runtime import config
from runtime.algorithms.losses import token_logprobs
from runtime.config import Config, Moe
from runtime.errors import ServiceFault
from runtime.models import hf_policy
from runtime.trainer.backend import confined, local, local_rows
from runtime.trainer.fsdp import optimizers
from runtime.trainer.megatron import passes
from runtime.trainer.step import ModelTrainer, critic_trainer, policy_trainer
from runtime.types import StepResult, TokenSets, TrainGroup, ValueRequest, encode_set
from tests.closeness import BFLOAT16, STEP, assert_close
from tests.loopback.megatron_equality import assert_equal
from tests.loopback.megatron_member import Layout, train
from tests.loopback.ranks import run_two
from tests.unit.lora_cases import LORA, assert_merged, lora_config
from tests.unit.tiny_models import WITH_EXPERTS, save_model
from tests.unit.training_cases import VOCAB, make_config, make_episodes, make_groups, make_policy
from tests.unit.training_steps import assert_metrics, assert_same, assert_updated, make_probes, weights
from tests.unit.training_steps import run_step as run_plain_step

pytestmark = [pytest.mark.numeric, pytest.mark.ranks]

STEPS = 3
Found = dict[str, Any]
SECTIONS = {
    "algorithm": {"kl_coefficient": 0.1, "entropy_coefficient": 0.01},
    "optimizer": {"eps": 1e-2, "max_grad_norm": 0.5},
    "training": {"max_tokens_per_microbatch": 24},  # so that ranks have unequal numbers of micro-batches
}
KINDS = ("policy", "adapters")
# Two results of some 32 operations, each rounded to bfloat16 once: √n·u, as in tests/closeness.py.
ROUNDED = 2 * math.sqrt(32) * BFLOAT16


def config_of(folder: Path, kind: str) -> Config:
    """`half`: adapters, passes in bfloat16 over weights in float32, of which some have a gradient."""
    if kind == "policy":
        return make_config(str(folder / "policy"), **SECTIONS)
    path, dtype = (folder / "half", "bfloat16") if kind == "half" else (folder / "policy", "auto")
    return lora_config(str(path), mode="adapter_off", dtype=dtype, **SECTIONS)


def step_groups(step: int, kind: str = "policy") -> list[TrainGroup]:
    groups = make_groups(step, step=step)
    return groups if kind == "policy" else [replace(group, reference=None) for group in groups]


def of_two(made: Config, rank: int) -> ModelTrainer:
    return policy_trainer(made, rank=rank, world_size=2, device="cpu")


def run_step(engine: ModelTrainer, calls: Sequence[list[TrainGroup]]) -> StepResult:
    engine.begin_step(engine.step)
    for groups in calls:
        engine.accumulate(groups)
    probes = {f"probe-{index}": gap for index, gap in enumerate(engine.compare(make_probes(engine.step)))}
    result = engine.apply()
    del result.metrics["padding_waste"]  # which depends on the packing alone
    result.metrics.update(probes)  # of rank 0
    return result


def whole(engine: ModelTrainer, rank: int) -> dict[str, torch.Tensor]:
    """The weights, on rank 0; of adapters, what rollouts make of them."""
    found = weights(engine)
    return {} if rank else found


def steps_of(engine: ModelTrainer, rank: int, kind: str = "policy") -> list[dict[str, float]]:
    results = []
    for step in range(STEPS):
        groups = step_groups(step, kind)
        calls = [groups[:1], groups[2:]] if rank == 0 else [groups[1:2], []]
        results.append(run_step(engine, calls).metrics)
    return results


def trained(folder: Path, kind: str, rank: int) -> Found:
    """What is trained, saved, exported, and trained on from the checkpoint of one rank."""
    engine = of_two(config_of(folder, kind), rank)
    with mock.patch("runtime.trainer.backend.CPU_CHUNK_ELEMENTS", 5 * VOCAB):  # what one rank computes in one chunk
        found: Found = {"steps": steps_of(engine, rank, kind)}
    engine.save(str(folder / f"{kind}-by-two"))
    found["weights"] = whole(engine, rank)
    engine.backend.export(folder / f"{kind}-export")
    engine.load(str(folder / f"{kind}-by-one"))
    found["loaded"] = whole(engine, rank)
    found["resumed"] = run_step(engine, [step_groups(STEPS, kind)] if rank == 0 else [[]]).metrics
    return found


def two_ranks(rank: int, folder: Path) -> None:
    """What each of two processes runs; it writes what it found to `folder`."""
    policy = str(folder / "policy")
    # The first of this process, since torch keeps meshes.
    with mock.patch("torch.cuda.is_available", return_value=True):
        beside_cuda: Any = of_two(make_config(policy), rank).backend
    mesh = next(iter(beside_cuda.parameters.values())).device_mesh
    found: Found = {"of_mesh": [mesh.get_group().group_name, dist.group.WORLD.group_name]}
    found |= {kind: trained(folder, kind, rank) for kind in KINDS}
    found["kept"], found["lent"] = lent_steps(policy, rank)
    half = of_two(config_of(folder, "half"), rank)
    found["half"] = [run_step(half, [step_groups(step, "half")[rank::2]]).metrics for step in range(STEPS)]
    # Without a gradient no backward pass follows the forward one; the next step must not see the weights of before.
    plain = of_two(make_config(policy, optimizer=SECTIONS["optimizer"]), rank)
    found["forward_only"] = [run_step(plain, [make]).metrics for make in with_one_uniform()]
    averaging = averaging_engine(policy, rank)
    found["averaged"] = {"steps": steps_of(averaging, rank), "weights": whole(averaging, rank)}
    torch.save(found, folder / f"found-{rank}.pt")


def two_more(rank: int, folder: Path) -> None:
    """The same of two others."""
    policy = str(folder / "policy")
    found: Found = {"batch_wide": batch_wide_steps(policy, rank)}
    found["uneven"] = [uneven_steps(policy, case, rank) for case in range(len(UNEVEN))]
    found["updates"] = several_updates(folder, rank)
    found["optimizers"] = {name: optimized(folder, name, rank) for name in OPTIMIZERS}
    found["vocabulary"] = vocabulary_spread(rank)
    torch.save(found, folder / f"more-{rank}.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fsdp")
    for name in (*KINDS, *OPTIMIZERS):
        for end in ("by-one", "by-two", "export"):
            (folder / f"{name}-{end}").mkdir()
    (folder / "policy").mkdir()
    (folder / "large").mkdir()
    hf_policy.load_policy(make_policy(folder / "policy")).to(torch.bfloat16).save_pretrained(folder / "half")
    make_policy(folder / "large", tied=False, **LARGE)
    return folder


@pytest.fixture(scope="module")
def single(folder: Path) -> dict[str, Found]:
    """By kind, what one rank finds; it writes what the two load."""
    found = {}
    for kind in KINDS:
        engine = policy_trainer(config_of(folder, kind))
        steps = [run_step(engine, [step_groups(step, kind)]).metrics for step in range(STEPS)]
        engine.save(str(folder / f"{kind}-by-one"))
        after = weights(engine)
        found[kind] = {"weights": after, "steps": [*steps, run_step(engine, [step_groups(STEPS, kind)]).metrics]}
    return found


@pytest.fixture(scope="module")
def found(folder: Path, single: dict[str, Found]) -> Found:
    """What two ranks found, as rank 0 tells it."""
    run_two(two_ranks, folder)
    return torch.load(folder / "found-0.pt", weights_only=True)


@pytest.fixture(scope="module")
def more(folder: Path, updated: dict[str, list[dict[str, torch.Tensor]]]) -> list[Found]:
    """What two others found, by rank."""
    run_two(two_more, folder)
    return [torch.load(folder / f"more-{rank}.pt", weights_only=True) for rank in range(2)]


def assert_trained(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], made: Config) -> None:
    """The same weights after STEPS steps, but for rounding."""
    if made.lora is None:
        assert_updated(got, expected, made.training.optimizer, steps=STEPS)
    else:
        assert_merged(got, expected, made, STEPS)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_those_of_one_rank(folder: Path, single: dict[str, Found], found: Found, kind: str):
    expected = single[kind]["steps"][:STEPS]
    for step, (got, wanted) in enumerate(zip(found[kind]["steps"], expected, strict=True)):
        assert_metrics(got, wanted, steps=step + 1)
    assert expected[-1]["actor/kl"] > 1e-4  # so the reference is not the policy
    assert_trained(found[kind]["weights"], single[kind]["weights"], config_of(folder, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_one_rank_is_loaded_by_two(single: dict[str, Found], found: Found, kind: str):
    assert_same(found[kind]["loaded"], single[kind]["weights"])
    assert_metrics(found[kind]["resumed"], single[kind]["steps"][STEPS])


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_two_ranks_is_loaded_by_one(folder: Path, single: dict[str, Found], found: Found, kind: str):
    engine = policy_trainer(config_of(folder, kind))
    engine.load(str(folder / f"{kind}-by-two"))
    assert engine.step == STEPS
    assert_same(weights(engine), found[kind]["weights"])
    assert_metrics(run_step(engine, [step_groups(STEPS, kind)]).metrics, single[kind]["steps"][STEPS], steps=STEPS + 1)


def test_what_two_ranks_export_is_whole(folder: Path, found: Found):
    exported = [dict(AutoModelForCausalLM.from_pretrained(folder / f"{kind}-export").named_parameters()) for kind in KINDS]
    assert_same({name: tensor.detach() for name, tensor in exported[0].items()}, found["policy"]["weights"])
    base = AutoModelForCausalLM.from_pretrained(folder / "policy")
    adapted = PeftModel.from_pretrained(base, folder / "adapters-export" / "adapter").merge_and_unload()
    for model in (exported[1], dict(adapted.named_parameters())):
        assert model.keys() == found["adapters"]["weights"].keys()
        for name, tensor in found["adapters"]["weights"].items():
            assert_close(model[name], tensor, terms=LORA.rank + 2, what=name)  # their product, its scale, the sum


def test_adapters_in_bfloat16(folder: Path, found: Found):
    engine = policy_trainer(config_of(folder, "half"))
    for step in range(STEPS):
        expected = run_step(engine, [step_groups(step, "half")]).metrics
        for name in ("actor/entropy", "actor/pg_loss", "actor/grad_norm"):
            assert found["half"][step][name] == pytest.approx(expected[name], rel=ROUNDED, abs=ROUNDED)


def averaging_engine(policy: str, rank: int) -> ModelTrainer:
    """On an FSDP2 as torch 2.7 has it, which can only average. It stays so in this process."""
    from torch.distributed.fsdp import FSDPModule

    del FSDPModule.set_gradient_divide_factor, FSDPModule.set_force_sum_reduction_for_comms
    return of_two(make_config(policy, **SECTIONS), rank)


def test_an_fsdp2_that_only_averages_gives_the_same(folder: Path, single: dict[str, Found], found: Found):
    for step, (averaged, summed) in enumerate(zip(found["averaged"]["steps"], found["policy"]["steps"], strict=True)):
        assert_metrics(averaged, summed, steps=step + 1)
    assert_trained(found["averaged"]["weights"], single["policy"]["weights"], config_of(folder, "policy"))


def test_shards_meet_in_the_ranks_own_group_where_torch_sees_cuda_beside_gloo(found: Found):
    of_mesh, own = found["of_mesh"]
    assert of_mesh == own


def lent_steps(policy: str, rank: int) -> tuple[int, list[dict[str, float]]]:
    """Of a trainer that gives its device up before each step, as if the CPU were an accelerator; and what it did not give back,
    in bytes."""
    engine = of_two(make_config(policy, **SECTIONS), rank)
    backend: Any = engine.backend
    backend.offloaded = ("optimizer", "param")
    kept, begin = 0, engine.begin_step

    def begin_step(step: int) -> None:
        nonlocal kept
        engine.backend.offload()
        shards = [local(parameter) for parameter in backend.model.parameters()]
        moments = [local(state["exp_avg"]) for state in backend.optimizer.state.values()]
        kept += sum(tensor.untyped_storage().nbytes() for tensor in shards + moments)
        engine.backend.onload()
        begin(step)

    chunks = mock.patch("runtime.trainer.backend.CPU_CHUNK_ELEMENTS", 5 * VOCAB)
    with chunks, mock.patch.object(engine, "begin_step", begin_step):
        results = steps_of(engine, rank)
    return kept, results


def test_shards_that_were_on_the_host_between_steps_are_the_same(found: Found):
    assert found["lent"] == found["policy"]["steps"]
    assert found["kept"] == 0


def with_one_uniform() -> tuple[list[TrainGroup], ...]:
    """Three steps; the second has no advantage."""
    steps = tuple(step_groups(step) for step in range(3))
    for group in steps[1]:
        group.rewards[:] = 1.0
    return steps


def test_a_step_without_gradient_leaves_nothing_stale(folder: Path, found: Found):
    engine = policy_trainer(make_config(str(folder / "policy"), optimizer=SECTIONS["optimizer"]))
    for step, (got, groups) in enumerate(zip(found["forward_only"], with_one_uniform(), strict=True)):
        # Both ranks trained on the same groups: sums double, means stay.
        assert_metrics(got, run_step(engine, [groups, groups]).metrics, steps=step + 1)


# Advantages that need sums over the batch, each of them of all ranks.
BATCH_WIDE = (
    {"advantage": "reinforce_plus_plus", "kl": "k1", "kl_placement": "reward", "kl_coefficient": 0.1},
    {"advantage": "reinforce_plus_plus_baseline", "loss": "ppo", "correction": "sequence_tis"},
    {"advantage": "group_norm", "group_std": "batch"},
    {"advantage": "gpg", "loss": "gpg"},
    # What is chosen among the tokens of all ranks.
    {"loss": "clip_cov", "loss_options": {"share": 0.3, "low": 0.0}},
    {"loss": "kl_cov", "loss_options": {"share": 0.3}},
)


def batch_wide_steps(policy: str, rank: int) -> list[dict[str, float]]:
    found = []
    for algorithm in BATCH_WIDE:
        engine = of_two(make_config(policy, **SECTIONS | {"algorithm": algorithm}), rank)
        for step in range(2):
            groups = step_groups(step)
            # The second rank's share comes late and in parts, or there is none.
            calls = ([groups[:1], groups[2:]] if step else [groups]) if rank == 0 else ([[], groups[1:2]] if step else [])
            found.append(run_step(engine, calls).metrics)
    return found


def test_batch_wide_advantages_are_over_all_ranks(folder: Path, more: list[Found]):
    got = iter(more[0]["batch_wide"])
    for algorithm in BATCH_WIDE:
        engine = policy_trainer(make_config(str(folder / "policy"), **SECTIONS | {"algorithm": algorithm}))
        for step in range(2):
            expected = run_step(engine, [step_groups(step)]).metrics
            assert expected["actor/grad_norm"] > 0
            assert_metrics(next(got), expected, steps=step + 1)


def many_groups(step: int) -> list[TrainGroup]:
    return make_groups(100 + step, (3, 3, 4, 2, 2), step=step, longest=20)


def many_episodes(step: int) -> list[TrainGroup]:
    return make_episodes(200 + step, (3, 3, 2, 2, 2), step=step, turns=True)


# A streamable algorithm, and one that waits for the whole batch, each under the budgets of the two ranks and of the single one;
# and what is trained on.
UNEVEN: dict[str, tuple[dict[str, Any], tuple[int, int], int, Callable[[int], list[TrainGroup]]]] = {
    "streamable": (
        {"kl_coefficient": 0.1, "loss": "ppo", "aggregation": "seq_mean_token_mean"}, (1, 60), 8192, many_groups
    ),
    "whole batch": (
        {"advantage": "reinforce_plus_plus_baseline", "loss": "ppo", "kl_coefficient": 0.1}, (8192, 20), 1, many_groups
    ),
    # Masked samples count, and no rank's filler.
    "masked samples": ({"aggregation": "dr_grpo", "entropy_coefficient": 0.01}, (60, 1), 8192, many_groups),
    "episodes": (
        {"aggregation": "episode_mean_token_mean", "kl_coefficient": 0.1, "turn_discount": 0.9}, (60, 1), 8192, many_episodes
    ),
    "episodes whole": (
        {"advantage": "group_norm", "group_std": "batch", "aggregation": "dr_grpo"}, (1, 8192), 60, many_episodes
    ),
    "distillation": (
        {"advantage": "none", "kl": "k1", "kl_placement": "advantage", "kl_coefficient": 1.0}, (1, 60), 8192, many_groups
    ),
}  # fmt: skip


def with_budget(policy: str, algorithm: dict[str, Any], budget: int) -> Config:
    return make_config(policy, **SECTIONS | {"algorithm": algorithm, "training": {"max_tokens_per_microbatch": budget}})


def uneven_steps(policy: str, case: int, rank: int) -> Found:
    """Nearly all samples go to one rank, then to the other, then all to one."""
    algorithm, budgets, _, make = list(UNEVEN.values())[case]
    engine, steps = of_two(with_budget(policy, algorithm, budgets[rank]), rank), []
    for step in range(STEPS):
        groups = make(step)
        few, many = groups[4:], groups[:4]
        shares = ([many[:3], many[3:]], [few, []]), ([[], few], [many[2:], many[:2]]), ([[]], [groups])
        steps.append(run_step(engine, shares[step][rank]).metrics)
    return {"steps": steps, "weights": whole(engine, rank)}


@pytest.mark.parametrize("case", range(len(UNEVEN)), ids=list(UNEVEN))
def test_budgets_and_shares_have_no_say(folder: Path, more: list[Found], case: int):
    algorithm, _, budget, make = list(UNEVEN.values())[case]
    engine = policy_trainer(made := with_budget(str(folder / "policy"), algorithm, budget))
    for step in range(STEPS):
        expected = run_step(engine, [make(step)]).metrics
        assert expected["actor/grad_norm"] > 0
        assert_metrics(more[0]["uneven"][case]["steps"][step], expected, steps=step + 1)
    assert_trained(more[0]["uneven"][case]["weights"], weights(engine), made)


# ---------------------------------------------------- several updates a step, PPO, and a loss that is not finite

UPDATED_STEPS, UPDATES = 2, 4  # updates of each step: two epochs of two mini-batches
PPO = {"advantage": "gae", "gamma": 0.9, "gae_lambda": 0.8, "kl": "k1", "kl_placement": "reward", "kl_coefficient": 0.1}
CASES: dict[str, tuple[Callable[..., ModelTrainer], dict[str, Any]]] = {
    "policy": (policy_trainer, {"kl_coefficient": 0.1}),
    "ppo": (policy_trainer, PPO),
    "interpolated": (policy_trainer, {"proximal": "interpolated"}),
    "critic": (critic_trainer, PPO),
}


def settings(folder: Path, algorithm: dict[str, Any], **training: Any) -> Config:
    training = {"groups_per_step": 4, "epochs": 2, "mini_batch_size": 2, "max_tokens_per_microbatch": 24} | training
    made = make_config(str(folder / "policy"), optimizer=SECTIONS["optimizer"], training=training, algorithm=algorithm)
    critic = config.Critic(value_clip=0.1, learning_rate=1e-2)
    return replace(made, critic=critic, run=replace(made.run, dir=str(folder)))


def batch(step: int) -> list[TrainGroup]:
    """Mini-batch 0 lies with both ranks, mini-batch 1 with one alone."""
    groups = make_groups(step, (4, 3, 5, 2), step=step)
    for place, group in enumerate(groups):
        group.mini_batch = place // 2
    return groups


def train_updates(engine: ModelTrainer, share: Sequence[int] = range(4)) -> list[dict[str, float]]:
    results = []
    for step in range(UPDATED_STEPS):
        metrics = run_plain_step(engine, [batch(step)[i] for i in share]).metrics
        metrics.pop("padding_waste", None)
        results.append(metrics)
    return results


def requests() -> list[ValueRequest]:
    return [ValueRequest(group_id=g.group_id, tokens=g.tokens, payload=g.payload) for g in batch(5)]


def several_updates(folder: Path, rank: int) -> Found:
    found: Found = {}
    for name, (make, algorithm) in CASES.items():
        engine = make(settings(folder, algorithm), rank=rank, world_size=2)
        found[name] = train_updates(engine, [0] if rank == 0 else [1, 2, 3])
    found["values"] = [each.values.tolist() for each in engine.values(requests()[:1] if rank == 0 else [])]
    engine = policy_trainer(settings(folder, {}, epochs=1, mini_batch_size=0), rank=rank, world_size=2)
    poisoned = batch(0)
    poisoned[1].rewards = np.full_like(poisoned[1].rewards, math.nan)
    with pytest.raises(ServiceFault) as told:
        run_plain_step(engine, poisoned[rank : rank + 1])
    return found | {"fault": str(told.value)}


@pytest.mark.parametrize("name", CASES)
def test_several_updates_are_those_of_one_rank(folder: Path, more: list[Found], name: str):
    make, algorithm = CASES[name]
    engine = make(settings(folder, algorithm))
    for step, (got, expected) in enumerate(zip(more[0]["updates"][name], train_updates(engine), strict=True)):
        assert_metrics(got, expected, steps=UPDATES * (step + 1))
    if name == "critic":
        expected = engine.values(requests())[0].values
        assert np.abs(expected).max() > 0.01
        assert_close(more[0]["updates"]["values"][0], expected, terms=UPDATES * UPDATED_STEPS * STEP)


def test_every_rank_names_the_samples_of_the_rank_whose_loss_is_not_finite(folder: Path, more: list[Found]):
    first, second = (each["updates"]["fault"] for each in more)
    assert first == second
    assert "micro-batch of samples 1:" in second
    written = json.loads((folder / "nonfinite" / "trainer-step-00000000.json").read_text())
    assert {group for micro_batch in written["micro_batches"] for group, _ in micro_batch} == {1}


# ---------------------------------------------------- optimizers beside AdamW

HAS_TORCHAO = importlib.util.find_spec("torchao") is not None
NEEDS_TORCHAO = pytest.mark.skipif(not HAS_TORCHAO, reason="torchao is missing: pip install 'sluice-rl[torchao]'")
OPTIMIZERS = ["muon", *(["adamw_8bit"] if HAS_TORCHAO else [])]
# Each rank's rows of a matrix are whole blocks of 8 bits, as they are of models of any use.
LARGE = {"hidden_size": 128, "intermediate_size": 128, "num_key_value_heads": 4, "initializer_range": 0.02}


def make_engine(folder: Path, name: str, rank: int = 0, world_size: int = 1) -> ModelTrainer:
    options = {"name": name, "learning_rate": 1e-2, "eps": 1e-2, "weight_decay": 0.1}
    made = make_config(str(folder / "large"), optimizer=options)
    return policy_trainer(made, rank=rank, world_size=world_size, device="cpu")


def update(engine: ModelTrainer) -> None:
    """One update by gradients that every number of ranks has bit for bit, each rank its rows of them."""
    generator, backend = torch.Generator().manual_seed(engine.step), engine.backend
    for parameter in backend.parameters.values():  # type: ignore[attr-defined]
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = torch.zeros_like(parameter)
        local(parameter.grad).copy_(gradient[local_rows(parameter)])
    backend.update(1.0, 1e-2)
    backend.clear_gradients()
    engine.step += 1


def optimized(folder: Path, name: str, rank: int) -> Found:
    engine = make_engine(folder, name, rank, 2)
    for _ in range(STEPS):
        update(engine)
    found: Found = {"updated": whole(engine, rank)}
    engine.save(str(folder / f"{name}-by-two"))
    engine.load(str(folder / f"{name}-by-one"))
    found["loaded"] = whole(engine, rank)
    update(engine)
    found["resumed"] = whole(engine, rank)
    stepping, groups = make_engine(folder, name, rank, 2), make_groups(0)
    found["norm"] = run_plain_step(stepping, groups[:1] if rank == 0 else groups[1:]).metrics["actor/grad_norm"]
    backend: Any = stepping.backend
    held = {optimizers.kept(backend.optimizer, each) for each in backend.parameters.values()}
    assert (("momentum_buffer",) in held) == (name == "muon")
    return found


@pytest.fixture(scope="module")
def updated(folder: Path) -> dict[str, list[dict[str, torch.Tensor]]]:
    """By optimizer, one rank's weights after STEPS updates, and after one more; it writes what the two load."""
    found = {}
    for name in OPTIMIZERS:
        engine = make_engine(folder, name)
        for _ in range(STEPS):
            update(engine)
        engine.save(str(folder / f"{name}-by-one"))
        after = weights(engine)
        update(engine)
        found[name] = [after, weights(engine)]
    return found


@pytest.mark.parametrize("name", ["muon", pytest.param("adamw_8bit", marks=NEEDS_TORCHAO)])
def test_an_optimizers_updates_and_checkpoints_are_those_of_one_rank_bit_for_bit(
    folder: Path, more: list[Found], updated: dict[str, list[dict[str, torch.Tensor]]], name: str
):
    got = more[0]["optimizers"][name]
    assert_same(got["updated"], updated[name][0])
    assert_same(got["loaded"], updated[name][0])
    assert_same(got["resumed"], updated[name][1])
    engine = make_engine(folder, name)
    assert got["norm"] == pytest.approx(run_plain_step(engine, make_groups(0)).metrics["actor/grad_norm"], rel=1e-4)
    engine.load(str(folder / f"{name}-by-two"))
    assert engine.step == STEPS
    assert_same(weights(engine), got["updated"])
    update(engine)
    assert_same(weights(engine), got["resumed"])


# ---------------------------------------------------- a vocabulary that is spread over two ranks

SHARES = (7, 4)  # of the vocabulary: the last rank has fewer, as padding is left out
TOKENS = torch.tensor([0, 6, 7, 10, 3, 8])
WAYS = list(product((1.0, 0.7), (True, False), (True, False)))  # temperature, whether entropies have a gradient, filters


def logits_and_weights() -> tuple[torch.Tensor, torch.Tensor]:
    """And of log-probabilities and entropies, the weights in what the gradient is of."""
    seeded = torch.Generator().manual_seed(1)
    logits = 6 * torch.randn(len(TOKENS), sum(SHARES), dtype=torch.float64, generator=seeded)
    return logits, torch.randn(2, len(TOKENS), dtype=torch.float64, generator=seeded)


def kept() -> torch.Tensor:
    """Of each token a set that it is in, as bits; of some in one rank's part alone, of one the whole vocabulary."""
    sets = ([0, 1], [0, 6, 7], [7, 10], [0, 1, 2, 3, 10], list(range(sum(SHARES))), [2, 8])
    encoded = [encode_set(np.array(each, np.int32), sum(SHARES)) for each in sets]
    return torch.from_numpy(TokenSets.of(encoded, sum(SHARES)).bitmaps(np.arange(len(sets))))


def vocabulary_spread(rank: int) -> list[tuple[torch.Tensor, ...]]:
    """Log-probabilities, entropies and the gradient of this rank's logits in each way, and where rank 1 has no token."""
    start, found = sum(SHARES[:rank]), []
    whole_logits, factors = logits_and_weights()
    for temperature, entropy_gradient, filtered in WAYS:
        own = whole_logits[:, start : start + SHARES[rank]].clone().requires_grad_()
        left = confined(own, kept() if filtered else None, start)
        logp, entropy = passes.token_logprobs(
            left, TOKENS, temperature, group=dist.group.WORLD, start=start, entropy_gradient=entropy_gradient
        )
        (factors * torch.stack([logp, entropy])).sum().backward()
        found.append((logp.detach(), entropy.detach(), own.grad))
    nothing = torch.zeros(2, 0 if rank else 3, dtype=torch.bfloat16, requires_grad=True)
    logp, entropy = passes.token_logprobs(nothing, torch.tensor([0, 2]), 1.0, dist.group.WORLD, 3 * rank, entropy_gradient=True)
    (logp.sum() + entropy.sum()).backward()
    return [*found, (logp.detach(), entropy.detach(), nothing.grad)]


def test_values_and_gradients_are_those_of_the_whole_vocabulary(more: list[Found]) -> None:
    logits, factors = logits_and_weights()
    for way, (temperature, entropy_gradient, filtered) in enumerate(WAYS):
        whole = logits.clone().requires_grad_()
        left = whole
        if filtered:
            bits = np.unpackbits(kept().numpy(), axis=1, bitorder="little")[:, : sum(SHARES)]
            left = whole.masked_fill(torch.from_numpy(bits) == 0, -1e30)
        logp, entropy = token_logprobs(left, TOKENS, temperature, entropy_gradient=entropy_gradient)
        (factors * torch.stack([logp, entropy])).sum().backward()
        assert whole.grad is not None
        for of_rank, gradient in zip(more, whole.grad.split(SHARES, dim=1), strict=True):
            wanted = (logp.detach(), entropy.detach(), gradient)
            for value, expected in zip(of_rank["vocabulary"][way], wanted, strict=True):
                terms = 4 * sum(SHARES)  # sums over the vocabulary, there and back
                assert_close(value, expected, terms=terms, unit=2.0**-53, what=str(WAYS[way]))


def test_a_rank_may_have_nothing_of_the_vocabulary(more: list[Found]) -> None:
    for of_rank, width in zip(more, (3, 0), strict=True):
        logp, entropy, gradient = of_rank["vocabulary"][-1]
        assert logp.dtype == torch.float32  # half precision is computed in it
        torch.testing.assert_close(logp, torch.full((2,), -math.log(3.0)))
        torch.testing.assert_close(entropy, -logp)
        assert gradient.shape == (2, width)


# ---------------------------------------------------- families that no other test trains so

MOE = {
    "glm4_moe": Moe(router_replay="routing", aux_loss=0.1, z_loss=0.01, bias_update=0.01),
    "mixtral": Moe(aux_loss=0.1, z_loss=0.01),
}


@pytest.mark.parametrize("family", ["mistral", "mixtral", "gemma3", "gpt_oss", "glm4_moe", "qwen3_next"])
def test_two_ranks_are_one(tmp_path: Path, family: str) -> None:
    save_model(tmp_path / "policy", family)
    (tmp_path / "policy" / "tokenizer.json").write_text('{"version": "1.0"}')
    moe = MOE.get(family, Moe())
    got = train(tmp_path, Layout(0, processes=2, moe=moe, budget=100))
    assert_equal(got, train(tmp_path, Layout(0, moe=moe, budget=100)))
    assert any(name.startswith("moe/") for name in got["metrics"][0]) == (family in WITH_EXPERTS)
