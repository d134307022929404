"""One rank of a trainer in some layout.

It trains FOLDER/policy, or as the critic FOLDER/critic, for some steps, from the beginning or from what the layout RESUMED
saved in the middle; rank 0 writes what it found to FOLDER/NAME.pt. A layout with tensor 0 is the torch engine.
"""

from __future__ import annotations

import importlib.metadata
import shutil
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec.structs import replace

from runtime import types
from runtime.cluster.topology import data_leaders
from runtime.config import Config, Critic, Moe, Parallel, Trainer
from runtime.process.waiting import in_thread
from runtime.trainer import backend
from runtime.trainer import rows as train_rows
from runtime.trainer.backend import full
from runtime.trainer.step import critic_trainer, policy_trainer
from runtime.types import GroupPayload, TrainGroup, ValueRequest
from tests.loopback.ranks import DEADLINE, FORKED, run_ranks
from tests.unit.lora_cases import LORA, lora_config
from tests.unit.training_cases import (
    VOCAB,
    make_config,
    make_episodes,
    make_groups,
    random_experts,
    with_random_experts,
    with_sets,
)
from tests.unit.training_steps import make_probes, run_step, weights

STEPS, SAVED, EPISODES = 5, 3, 1
CRITIC = {"advantage": "gae", "gamma": 0.9, "gae_lambda": 0.8}
OPTIMIZER: dict[str, Any] = {"learning_rate": 1e-3, "eps": 1e-2, "max_grad_norm": 0.5}  # so that no rounding becomes a sign
SECTIONS = {"algorithm": {"kl_coefficient": 0.1, "entropy_coefficient": 0.01}, "optimizer": {**OPTIMIZER, "weight_decay": 0.1}}


class Layout(NamedTuple):
    tensor: int
    pipeline: int = 1
    sequence: bool = False
    processes: int = 1
    context: int = 1
    layers_per_stage: Sequence[int] = ()
    dtype: str = "float32"
    expert: int = 1
    moe: Moe = Moe()
    lora: str = ""  # adapters on "all" layers, or on one; the reference is the policy without them
    budget: int = 40  # tokens a micro-batch
    recompute: bool = False

    @property
    def name(self) -> str:
        return "-".join(map(str, [*self[:5], *self.layers_per_stage, self.dtype, self.expert, self.lora]))

    def config(self, folder: Path, role: str) -> Config:
        parallel = Parallel(
            tensor=max(1, self.tensor),
            pipeline=self.pipeline,
            sequence=self.sequence,
            context=self.context,
            expert=self.expert,
            layers_per_stage=list(self.layers_per_stage),
        )
        engine: Any = "megatron" if self.tensor else "torch"
        settings = Trainer(
            processes=self.processes,
            engine=engine,
            parallel=parallel,
            activation_checkpointing=self.sequence or self.recompute,  # in some of the layouts; it changes no number
        )
        sections = SECTIONS | {"training": {"max_tokens_per_microbatch": self.budget}}
        if self.lora:
            lora = replace(LORA, target_modules=[] if self.lora == "all" else [self.lora])
            options = {"mode": "adapter_off", "dtype": self.dtype, "trainer": settings, **sections}
            return replace(lora_config(str(folder / "policy"), lora, **options), moe=self.moe)
        if role == "trainer":
            config = make_config(str(folder / "policy"), dtype=self.dtype, trainer=settings, **sections)
            return replace(config, moe=self.moe)
        config = make_config(str(folder / "policy"), dtype=self.dtype, **sections | {"algorithm": CRITIC})
        critic = Critic(path=str(folder / "critic"), learning_rate=OPTIMIZER["learning_rate"])
        return replace(config, critic=critic, services=replace(config.services, critic=settings))


def train(folder: Path, layout: Layout, resumed: str = "", role: str = "trainer", context: Any = FORKED) -> dict[str, Any]:
    """What rank 0 found: log-probabilities (or values) before each step, metrics, and the tensors published in the end, by
    name; of adapters, what rollouts make of them."""
    if not resumed:
        for name in ("saved-by", "end-of"):
            shutil.rmtree(folder / f"{name}-{layout.name}", ignore_errors=True)
    run_ranks(member, folder, layout.processes, layout, role, resumed, context=context)
    found: dict[str, Any] = torch.load(folder / f"{layout.name}.pt")
    return found


def groups_of(step: int) -> list[TrainGroup]:
    """Replies of a sampler with filters; in one step episodes of several branches, in the last of its groups without a common
    prompt."""
    if step == EPISODES:
        return make_episodes(step, (3, 2), step=step)
    rng = np.random.default_rng(step)
    return [with_sets(group, rng) for group in make_groups(step, (5, 4, 6, 3), step=step)]


def member(rank: int, folder: Path, layout: Layout, role: str, resumed: str) -> None:
    config = layout.config(folder, role)
    device = torch.device("cpu")
    if layout.sequence:  # in some of the layouts
        backend.CPU_CHUNK_ELEMENTS = 5 * VOCAB // layout.tensor
    make: Any = policy_trainer if role == "trainer" else critic_trainer
    engine: Any = make(config, rank=rank, world_size=layout.processes, device=device)
    if role == "trainer":  # fixed, and their sum is not 0
        engine.objective.advantages = lambda rows, *_: rows.rewards[:, None].astype(np.float64) + 0.5
    if resumed:
        engine.load(str(folder / f"saved-by-{resumed}"))
    leaders = data_leaders(getattr(config.services, role))
    numbers, metrics = [], []
    gradient: dict[str, torch.Tensor] = {}
    saving: Future[None] | None = None
    for step in range(SAVED if resumed else 0, STEPS):
        if step == SAVED and not resumed:
            (folder / f"saved-by-{layout.name}").mkdir(exist_ok=True)
            write = engine.begin_save(str(folder / f"saved-by-{layout.name}"))
            if layout.tensor:
                saving = in_thread("save", write)  # beside the steps to come
            else:
                write()
        groups, probes = (
            [replace(group, reference=None) if layout.lora else group for group in groups_of(step)],
            make_probes(step),
        )
        if (routes := engine.objective.needs.experts) is not None:
            groups = random_experts(groups, routes)
            probes = [types.encode(with_random_experts(types.decode(GroupPayload, probe), routes)) for probe in probes]
        needs = engine.objective.needs
        rows = train_rows.rows_of(train_rows.check_groups(groups, engine.backend.vocab_size, needs), needs)
        numbers.append(torch.from_numpy(engine._per_token_output(rows)))
        share = groups[leaders.index(rank) :: len(leaders)] if rank in leaders else []
        if role == "critic":
            check_values(engine, share, numbers[-1], len(groups) if len(leaders) == 1 else 0)
        result = run_step(engine, share[:1], share[1:], probes=probes if role == "trainer" else [])
        if step == 0 and layout.moe != Moe():
            gradient = first_gradient(engine)
        metrics.append(result.metrics | {f"probe-{index}": gap for index, gap in enumerate(result.probes)})
    if saving is not None:
        saving.result(DEADLINE)
    if not resumed:
        (folder / f"end-of-{layout.name}").mkdir(exist_ok=True)
        engine.save(str(folder / f"end-of-{layout.name}"))
    published = publish(engine, rank, folder / f"export-{layout.name}") if role == "trainer" else {}
    if rank == 0:
        version = importlib.metadata.version("megatron-core")
        found = {"numbers": numbers, "metrics": metrics, "published": published, "megatron": version, "gradient": gradient}
        torch.save(found, folder / f"{layout.name}.pt")


def first_gradient(engine: Any) -> dict[str, torch.Tensor]:
    """On rank 0 the clipped gradient of the first step, as Adam keeps it: times 1 − β₁."""
    backend, kind = engine.backend, "exp_avg"
    if not hasattr(backend, "grid"):
        return {name: full(backend.optimizer.state[each][kind]).clone() for name, each in backend.parameters.items()}
    from runtime.trainer.megatron.weights import ModelWeights

    held = {name: backend.optimizer.gather(each)[kind] for name, each in backend.model.named_parameters()}
    held |= {name: torch.zeros_like(each) for name, each in backend.weights._parameters.items() if name not in held}
    wholes = ModelWeights(backend.family, held, backend.grid).wholes(torch.float32)
    return {name: whole.clone() for name, whole in wholes if not name.endswith("e_score_correction_bias")}


def check_values(engine: Any, share: list[TrainGroup], expected: torch.Tensor, count: int) -> None:
    """The values of this rank's share, which is all there is where it has `count` groups."""
    asked = [ValueRequest(group_id=group.group_id, tokens=group.tokens, payload=group.payload) for group in share]
    values = engine.values(asked)
    assert [each.group_id for each in values] == [each.group_id for each in asked]
    if count and len(values) == count:
        of_valid = expected != 0  # a sample that is not valid has values too
        torch.testing.assert_close(
            torch.from_numpy(np.concatenate([each.values for each in values]))[of_valid], expected[of_valid]
        )


def publish(engine: Any, rank: int, export: Path) -> dict[str, torch.Tensor]:
    found = weights(engine)
    export.mkdir(exist_ok=True)
    engine.backend.export(export)
    return {} if rank else found
