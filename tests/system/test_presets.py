"""The presets rehearsed: five steps of each family's representative, the same file with a tiny random model of the family."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.config.loading import load
from runtime.data import arithmetic
from runtime.ledger.reader import LedgerReader
from tests.system.runs import ROOT, VLLM_PYTHON, Live, needs_vllm, sluice, steps, summary, trained

pytestmark = pytest.mark.timeout(420)

RUN = 300.0
STEPS, GROUPS = 5, 2
SMALL = (f"training.steps={STEPS}", f"training.groups_per_step={GROUPS}", "sampling.max_new_tokens=8", "deadlines.stop=60")
# Rewards that differ, which dynamic sampling waits for, and a random model's answers do not have.
LETTERS = "rewards.rules=[{name: configs/rehearsal.py:letters}]"


def gsm8k(problem: arithmetic.ArithmeticProblem) -> dict[str, Any]:
    return {"question": problem.question, "answer": problem.answer}


def r1(problem: arithmetic.ArithmeticProblem) -> dict[str, Any]:
    return {"problem": problem.question, "answer": problem.answer.rpartition("#### ")[2]}


def math17k(problem: arithmetic.ArithmeticProblem) -> dict[str, Any]:
    label = {"ground_truth": problem.answer.rpartition("#### ")[2]}
    return {"prompt": [{"role": "user", "content": problem.question}], "reward_model": label}


def rehearsed(
    folder: Path, preset: str, row: Callable[[arithmetic.ArithmeticProblem], dict[str, Any]], *overrides: str
) -> Live:
    """Of the preset's own data layout, so that its handler reads it."""
    problems, _ = arithmetic.split(10, 30, 32, 1)
    data = folder / "train.jsonl"
    data.write_text("".join(json.dumps(row(problem)) + "\n" for problem in problems))
    config = ROOT / "configs" / f"{preset}.yaml"
    return trained(config, f"data.train={data}", "cluster={}", *SMALL, *overrides, folder=folder / "run", timeout=RUN)


def check(folder: Path, group_size: int, steps_done: int = STEPS) -> list[dict[str, Any]]:
    """The metrics of a run that trained on all its samples, none of them too old."""
    found = steps(folder)
    assert [point["step"] for point in found] == list(range(1, steps_done + 1))
    for point in found:
        assert point["samples"] == GROUPS * group_size
        assert point["score/masked"] == 0
        assert point["staleness/max"] <= 2
    assert summary(folder)["groups"]["retired"] == steps_done * GROUPS
    return found


def types(folder: Path) -> Iterator[str]:
    """The model_type of the models of the run, as it was and as it was trained."""
    for path in (load(folder / "config.yaml").model.path, folder / "model"):
        yield json.loads((ROOT / path / "config.json").read_text())["model_type"]


def test_gsm8k_and_going_on_with_it(tmp_path: Path) -> None:
    common = ("model=tiny:qwen2", "services=one_machine", "sampling.group_size=4")
    run = rehearsed(tmp_path, "gsm8k_qwen25_1_5b", gsm8k, *common)
    found = check(run.folder, 4)
    assert set(types(run.folder)) == {"qwen2"}
    assert all("actor/kl" in point for point in found)  # of a reference that is tiny too
    run = rehearsed(tmp_path, "gsm8k_qwen25_1_5b", gsm8k, *common, "run.resume=auto", "training.steps=7")
    check(run.folder, 4, 7)
    with LedgerReader(run.folder / "ledger") as reader:
        problems = [group.problem for group in reader.groups()]
    assert len(problems) == len(set(problems))  # none was repeated


def test_ppo(tmp_path: Path) -> None:
    run = rehearsed(tmp_path, "ppo_qwen25_32b", r1, "model=tiny:qwen2", "services=one_machine", "sampling.group_size=2")
    found = check(run.folder, 2)
    assert all(point["critic/grad_norm"] > 0 for point in found)


def test_dapo_with_rewards_that_differ(tmp_path: Path) -> None:
    run = rehearsed(tmp_path, "atlas/dapo_qwen3_32b_a3", math17k, "model=tiny:qwen3", "services=one_machine", LETTERS)
    found = check(run.folder, 8)
    assert set(types(run.folder)) == {"qwen3"}
    assert all(point["actor/grad_norm"] > 0 for point in found)


EMBEDDED = ("services=one_machine",)
OTHERS = ("services=one_machine_vllm", f"services.rollout.python={VLLM_PYTHON}")


@pytest.mark.parametrize(
    "layout", [EMBEDDED, pytest.param(OTHERS, marks=[needs_vllm, pytest.mark.vllm])], ids=["embedded", "vllm"]
)
def test_dapo_of_a_mixture_of_experts(tmp_path: Path, layout: tuple[str, ...]) -> None:
    replay = "moe={replay: routing, aux_loss: 0.001}" if layout == EMBEDDED else "moe={}"
    run = rehearsed(tmp_path, "dapo_qwen3_30b_a3b", math17k, "model=tiny:qwen3_moe", *layout, LETTERS, replay)
    found = check(run.folder, 8)
    assert set(types(run.folder)) == {"qwen3_moe"}
    assert all(point["actor/grad_norm"] > 0 for point in found)
    # Before any token is of two versions, both engines have the same weights.
    assert found[0]["mismatch/tokens"] > 0
    assert found[0]["mismatch/max"] < 1e-4
    if layout == EMBEDDED:  # whose trainer is on engine torch
        # It gives tokens to the rollouts' experts, which its own router would choose, too, but for rounding.
        assert found[0]["moe/routing_differs"] < 0.02
        assert all(point["moe/routing_differs"] < 0.5 and point["moe/load_max"] >= 1 for point in found)


def test_a_reward_model_is_made_too(tmp_path: Path) -> None:
    """Of a configuration that names one of its own."""
    judge = ("rewards={model: {path: /models/judge}}", "algorithm.kl_coefficient=0.0")
    overrides = (*judge, "model=tiny:llama", "services=one_machine", "sampling.group_size=4")
    run = rehearsed(tmp_path, "gsm8k_qwen25_1_5b", gsm8k, *overrides)
    found = check(run.folder, 4)
    assert set(types(run.folder)) == {"llama"}
    assert all(point["score/max"] > point["score/min"] for point in found)


def test_a_family_that_is_none_starts_nothing(tmp_path: Path) -> None:
    config = str(ROOT / "configs" / "gsm8k_qwen25_1_5b.yaml")
    ended = sluice("train", config, "model=tiny:gpt9", f"run.dir={tmp_path / 'run'}")
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: model: 'tiny:gpt9' is not a section of keys, nor one of tiny:deepseek_v3, ")
    assert len(ended.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()
