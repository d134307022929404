"""Experts that are spread over ranks train as those of one rank do, over real gloo: losses, norms, weights, and all that is
saved, sent or kept of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file

from runtime.config import Config, Critic, Lora, Moe, Parallel, Trainer
from runtime.models import experts
from runtime.trainer.step import ModelTrainer, critic_trainer, policy_trainer
from runtime.types import TrainGroup
from tests.closeness import STEP, assert_close
from tests.loopback.ranks import run_ranks
from tests.unit.tiny_models import save_model
from tests.unit.training_cases import make_config, make_groups, random_experts
from tests.unit.training_steps import assert_metrics, assert_same, assert_updated, comparable, run_step, weights

pytestmark = [pytest.mark.numeric, pytest.mark.ranks]

STEPS = 3
Found = dict[str, Any]
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # model, its balance, and how it is trained
    "learned": ("qwen3_moe", {"aux_loss": 0.05, "z_loss": 0.01}, {"activation_checkpointing": True}),
    "idle": ("mixtral", {}, {"activation_checkpointing": "selective"}),  # all tokens take the experts that one rank holds
    "corrected": ("glm4_moe", {"bias_update": 0.01}, {}),
    "bfloat16": ("glm4_moe", {}, {}),
}


def config_of(folder: Path, case: str, processes: int = 1, expert: int = 1) -> Config:
    name, moe, settings = CASES[case]
    trainer = Trainer(processes=processes, parallel=Parallel(expert=expert), **settings)
    sections = {"algorithm": {"kl_coefficient": 0.1}, "optimizer": {"eps": 1e-2, "max_grad_norm": 0.5}}
    sections["training"] = {"max_tokens_per_microbatch": 24}  # so that ranks have unequal numbers of micro-batches
    dtype = "bfloat16" if case == "bfloat16" else "auto"
    made = make_config(str(folder / name), trainer=trainer, dtype=dtype, **sections)
    return replace(made, moe=Moe(router_replay="routing", **moe))


def engine_of(folder: Path, case: str, rank: int = 0, processes: int = 1, expert: int = 1) -> ModelTrainer:
    made = config_of(folder, case, processes, expert)
    return policy_trainer(made, rank=rank, world_size=processes, device=torch.device("cpu"))


def step_groups(engine: ModelTrainer, rank: int = 0, processes: int = 1) -> list[TrainGroup]:
    """This rank's share of a step's groups."""
    layers, per_token, count = engine.objective.needs.experts
    shape = layers, per_token, 2 if engine._config.model.path.endswith("mixtral") else count
    groups = random_experts(make_groups(engine.step, (5, 4, 6, 3), step=engine.step), shape)
    return groups[rank::processes]


def steps_of(engine: ModelTrainer, rank: int = 0, processes: int = 1) -> list[dict[str, float]]:
    return [comparable(run_step(engine, step_groups(engine, rank, processes))) for _ in range(STEPS)]


def pieces_of(engine: ModelTrainer) -> dict[tuple[str, int], torch.Tensor]:
    return {(name, start): data.clone() for name, start, data in engine.backend.pieces()}


def member(rank: int, folder: Path, processes: int, cases: list[str]) -> None:
    """Train each case with groups of two ranks, from the start and from the checkpoint of one rank. Of four ranks, experts are
    multiplied as on accelerators."""
    found: Found = {}
    if processes == 4:
        experts._STACKED = {"cpu"}
    for case in cases:
        engine = engine_of(folder, case, rank, processes, expert=2)
        found[case] = {"steps": steps_of(engine, rank, processes), "weights": weights(engine)}
        engine.save(str(folder / f"{case}-by-{processes}"))
        engine.export(folder / f"{case}-export-{processes}")
        found[case]["pieces"] = pieces_of(engine)
        engine.load(str(folder / f"{case}-by-1"))
        found[case]["loaded"] = weights(engine)
        found[case]["resumed"] = comparable(run_step(engine, step_groups(engine, rank, processes)))
    torch.save(found, folder / f"found-{processes}-{rank}.pt")


def adapted(folder: Path, rank: int = 0, processes: int = 1) -> Found:
    """Train adapters in experts, which are not spread, with the experts of the rollout. Some experts have no tokens."""
    lora = Lora(rank=4, alpha=12.0, target_modules=["q_proj", "gate_proj", "down_proj"])
    made = replace(config_of(folder, "learned", processes), lora=lora, moe=Moe(router_replay="routing"))
    engine = policy_trainer(made, rank=rank, world_size=processes, device=torch.device("cpu"))
    return {"steps": steps_of(engine, rank, processes), "weights": weights(engine)}


def adapted_member(rank: int, folder: Path) -> None:
    torch.save(adapted(folder, rank, 2), folder / f"adapted-{rank}.pt")


def critic(folder: Path, rank: int = 0, processes: int = 1) -> list[float]:
    """Return the norms of a critic's gradients, with spread experts if there are several ranks."""
    made = make_config(str(folder / "qwen3_moe"), algorithm={"advantage": "gae"}, optimizer={"eps": 1e-2})
    settings = Trainer(processes=processes, parallel=Parallel(expert=processes))
    made = replace(made, critic=Critic(), services=replace(made.services, critic=settings))
    engine = critic_trainer(made, rank=rank, world_size=processes, device=torch.device("cpu"))
    groups = (make_groups(step, (5, 4, 6, 3), step=step)[rank::processes] for step in range(STEPS))
    return [run_step(engine, own).metrics["critic/grad_norm"] for own in groups]


def critic_member(rank: int, folder: Path) -> None:
    torch.save(critic(folder, rank, 2), folder / f"critic-{rank}.pt")


def without(rank: int, folder: Path, case: str) -> None:
    """Go on from the checkpoint of four ranks, with experts that are not spread."""
    engine = engine_of(folder, case, rank, 2)
    engine.load(str(folder / f"{case}-by-4"))
    found = {"loaded": weights(engine), "resumed": comparable(run_step(engine, step_groups(engine, rank, 2)))}
    torch.save(found, folder / f"without-{rank}.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("spread")
    for name in {each[0] for each in CASES.values()}:
        save_model(folder / name, name)
        (folder / name / "tokenizer.json").write_text('{"version": "1.0"}')
    for case in CASES:
        for ranks in (1, 2, 4):
            (folder / f"{case}-by-{ranks}").mkdir()
    return folder


@pytest.fixture(scope="module")
def single(folder: Path) -> Found:
    """What one rank finds, by case; it writes what the others load."""
    found = {}
    for case in CASES:
        engine = engine_of(folder, case)
        found[case] = {"steps": steps_of(engine), "weights": weights(engine)}
        engine.save(str(folder / f"{case}-by-1"))
        found[case]["resumed"] = comparable(run_step(engine, step_groups(engine)))
    return found


@pytest.fixture(scope="module")
def found(folder: Path, single: Found) -> dict[int, list[Found]]:
    """What the ranks of two and of four found."""
    cases = {2: list(CASES), 4: ["learned", "corrected"]}
    for ranks, names in cases.items():
        run_ranks(member, folder, ranks, ranks, names)
    return {n: [torch.load(folder / f"found-{n}-{rank}.pt", weights_only=True) for rank in range(n)] for n in cases}


EQUAL = [(2, case) for case in CASES if case != "bfloat16"] + [(4, "learned"), (4, "corrected")]


@pytest.mark.parametrize(("ranks", "case"), EQUAL)
def test_steps_are_those_of_one_rank(folder: Path, single: Found, found: dict[int, list[Found]], ranks: int, case: str) -> None:
    got, expected = found[ranks][0][case], single[case]
    for step, (metrics, wanted) in enumerate(zip(got["steps"], expected["steps"], strict=True)):
        assert_metrics(metrics, wanted, steps=step + 1)
    optimizer = config_of(folder, case).training.optimizer
    assert_updated(got["weights"], expected["weights"], optimizer, steps=STEPS)
    assert_same(got["loaded"], expected["weights"])
    assert_metrics(got["resumed"], expected["resumed"], steps=STEPS + 1)


@pytest.mark.parametrize(("ranks", "case"), EQUAL)
def test_what_is_exported_saved_and_kept_is_what_is_sent(
    folder: Path, found: dict[int, list[Found]], ranks: int, case: str
) -> None:
    sent = found[ranks][0][case]["weights"]
    assert_same(load_file(folder / f"{case}-export-{ranks}" / "model.safetensors"), sent)
    alone = engine_of(folder, case)
    alone.load(str(folder / f"{case}-by-{ranks}"))
    assert_same(weights(alone), sent)
    parts = {place: data for each in found[ranks] for place, data in each[case]["pieces"].items()}
    for (name, start), data in pieces_of(alone).items():
        assert start == 0
        own = [parts.pop(place) for place in sorted(parts) if place[0] == name]
        assert torch.equal(torch.cat(own), data), name
    assert not parts


def test_two_ranks_go_on_without_spreading(folder: Path, single: Found, found: dict[int, list[Found]]) -> None:
    run_ranks(without, folder, 2, "corrected")
    got = torch.load(folder / "without-0.pt", weights_only=True)
    assert_same(got["loaded"], found[4][0]["corrected"]["weights"])
    assert_metrics(got["resumed"], single["corrected"]["resumed"], steps=STEPS + 1)


def test_passes_in_bfloat16(single: Found, found: dict[int, list[Found]]) -> None:
    for got, expected in zip(found[2][0]["bfloat16"]["steps"], single["bfloat16"]["steps"], strict=True):
        for name in ("actor/pg_loss", "actor/entropy", "actor/grad_norm"):
            assert got[name] == pytest.approx(expected[name], rel=0.05, abs=0.05)


def test_adapters_of_two_ranks_are_those_of_one(folder: Path) -> None:
    pytest.importorskip("peft", reason="needs PEFT: pip install 'sluice-rl[lora]'")
    run_ranks(adapted_member, folder, 2)
    got, expected = torch.load(folder / "adapted-0.pt", weights_only=True), adapted(folder)
    for step, (metrics, wanted) in enumerate(zip(got["steps"], expected["steps"], strict=True)):
        assert_metrics(metrics, wanted, steps=step + 1)
    assert_updated(got["weights"], expected["weights"], config_of(folder, "learned").training.optimizer, steps=2 * 12 * STEPS)


def test_a_critic_may_be_spread(folder: Path) -> None:
    run_ranks(critic_member, folder, 2)
    assert_close(torch.load(folder / "critic-0.pt"), critic(folder), terms=STEPS * STEP)
