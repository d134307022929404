"""The presets rehearsed: some steps of each kind's representative, the same file with a tiny random model of a family. Each run
has more to show: adapters and a curriculum, PPO with several updates and a reward model, experts and groups without signal."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from runtime.config.loading import load
from runtime.data import arithmetic
from runtime.ledger.reader import LedgerReader
from runtime.ledger.states import Phase
from tests.metric_names import described, pattern
from tests.system.runs import (
    ROOT,
    VLLM_PYTHON,
    Live,
    check_gone,
    here,
    needs_vllm,
    points,
    refused,
    started,
    steps,
    summary,
    trained,
)

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


def rehearsal(
    folder: Path, preset: str, row: Callable[[arithmetic.ArithmeticProblem], dict[str, Any]], *overrides: str
) -> tuple[Path, tuple[str, ...]]:
    """The preset, and what makes it small: of its own data layout, so that its handler reads it."""
    problems, _ = arithmetic.split(10, 30, 32, 1)
    data = folder / "train.jsonl"
    rows = ({**row(problem), "level": len(problems) - at} for at, problem in enumerate(problems))
    data.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return ROOT / "configs" / f"{preset}.yaml", (f"data.train={data}", "cluster={}", *SMALL, *overrides)


def rehearsed(
    folder: Path, preset: str, row: Callable[[arithmetic.ArithmeticProblem], dict[str, Any]], *overrides: str
) -> Live:
    config, small = rehearsal(folder, preset, row, *overrides)
    return trained(config, *small, folder=folder / "run", timeout=RUN)


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


NAMES = [pattern(name) for name in described()]


def check_names(folder: Path) -> None:
    """Whatever the run logged is in docs/metrics.md."""
    logged = {name for point in points(folder) for name in point} - {"step", "time"}
    assert sorted(name for name in logged if not any(each.fullmatch(name) for each in NAMES)) == []


def test_adapters_alone_are_trained_against_the_policy_without_them_and_come_back(tmp_path: Path) -> None:
    """The easiest problems come first, and are last in the file."""
    settings = (
        *("model=tiny:qwen2", "services=one_machine", "sampling.group_size=4", LETTERS),
        *("lora={rank: 4}", "reference={source: adapter_off}", "training.optimizer.learning_rate=0.01", "checkpoint.every=2"),
        *("data.curriculum={key: level}", "data.eval="),
    )
    (config, overrides), folder = rehearsal(tmp_path, "gsm8k_qwen25_1_5b", gsm8k, *settings), tmp_path / "run"
    with started(config, *overrides, "training.steps=12", folder=folder) as run:
        run.reaches(3)
        run.member("trainer-0").kill()
        run.says("trainer-0: run: ", RUN)
        assert run.wait(RUN) == 0, run.output + run.errors
        check_gone(folder)
    check_names(folder)
    found = steps(folder)
    assert sorted({point["step"] for point in found}) == list(range(1, 13))
    assert set(types(folder)) == {"qwen2"}
    assert not list((folder / "logs").glob("reference*"))
    base, adapters = ROOT / load(folder / "config.yaml").model.path, folder / "model" / "adapter" / "adapter_model.safetensors"
    lora = load_file(adapters)
    assert all("lora_" in name for name in lora)
    assert any(tensor.abs().sum() > 0 for name, tensor in lora.items() if "lora_B" in name)
    before, after = (load_file(one / "model.safetensors") for one in (base, folder / "model"))
    changed = {name for name, tensor in after.items() if not tensor.equal(before[name])}
    assert changed
    assert all("_proj" in name for name in changed)
    assert found[-1]["actor/kl"] > 0
    sent = sum(tensor.nbytes for tensor in lora.values())
    for point in found:  # rollouts get the adapters alone, before and after the kill, and serve what is trained
        assert sent <= point["weight_sync/bytes"] < 1.5 * sent
        assert point["mismatch/abs_logprob"] < 1e-4
    with LedgerReader(folder / "ledger") as reader:
        trained_on = {group.problem: group.label for group in reader.groups(states=[Phase.RETIRED])}
    assert len(trained_on) == 12 * GROUPS  # none was repeated
    easiest = (tmp_path / "train.jsonl").read_text().splitlines()[-2 * len(trained_on) :]
    assert set(trained_on.values()) <= {json.loads(row)["answer"].rpartition("#### ")[2] for row in easiest}
    other = shutil.copytree(base, tmp_path / "other")
    name = min(changed)
    save_file(before | {name: before[name] + 1}, other / "model.safetensors", metadata={"format": "pt"})
    going = ("model={}", f"model.path={other}", "training.steps=14", "run.resume=auto")
    both = [rf"{path} \(fingerprint \w+\)" for path in (other, base)]
    told = rf"model\.path: {both[0]} is not the base of the adapters in .*; their base is {both[1]}"
    assert re.search(told, refused(config, folder, *overrides, *going, whole=True))


def test_ppo_with_two_updates_a_mini_batch_and_a_reward_model(tmp_path: Path) -> None:
    """A reward model is made of a configuration that names one of its own."""
    settings = (
        *("rewards={model: {path: /models/judge}}", "model=tiny:llama", "services=one_machine", "sampling.group_size=2"),
        *("training.epochs=2", "training.mini_batch_size=1", "critic.learning_rate=1e-3"),
    )
    run = rehearsed(tmp_path, "ppo_qwen25_32b", r1, *settings)
    check_names(run.folder)
    found = check(run.folder, 2)
    assert set(types(run.folder)) == {"llama"}
    own = {"timing/old_log_p", "timing/update_critic", "critic/vf_loss", "critic/grad_norm", "actor/pg_loss"}
    own |= {f"{what}/{part}" for what in ("critic/values", "critic/returns", "advantages") for part in ("mean", "max", "min")}
    for point in found:
        assert own <= point.keys()
        assert point["critic/grad_norm"] > 0
        assert point["score/max"] > point["score/min"]
    assert all(point["score/mean"] == pytest.approx(point["reward_model_rewards/mean"], abs=1e-5) for point in found)
    assert not list((run.folder / "logs").glob("reward-*"))
    newest = run.folder / "checkpoints" / f"step-{STEPS:08d}" / "critic" / "model"
    assert AutoModelForSequenceClassification.from_pretrained(newest).score.weight.abs().sum() > 0
    AutoModelForCausalLM.from_pretrained(run.folder / "model")


UNLIMITED = "algorithm.dynamic_sampling_limit=1000"
HALF = """
from sluice import rule

@rule("half")
def half(text, label, context):
    # The same for all replies to every second prompt.
    return 0.0 if int(label) % 2 else float(sum(map(ord, text)) % 7)
"""
EMBEDDED = ("services=one_machine",)
OTHERS = ("services=one_machine_vllm", f"services.rollout.python={VLLM_PYTHON}")


@pytest.mark.parametrize(
    "layout", [EMBEDDED, pytest.param(OTHERS, marks=[needs_vllm, pytest.mark.vllm, pytest.mark.long])], ids=["embedded", "vllm"]
)
def test_dapo_of_a_mixture_of_experts_whose_groups_without_signal_are_replaced(tmp_path: Path, layout: tuple[str, ...]) -> None:
    replay = "moe={router_replay: routing, aux_loss: 0.001}" if layout == EMBEDDED else "moe={}"
    (tmp_path / "rules.py").write_text(HALF)
    half = f"rewards.rules=[{{name: '{tmp_path / 'rules.py'}:half'}}]"
    run = rehearsed(tmp_path, "dapo_qwen3_30b_a3b", math17k, "model=tiny:qwen3_moe", *layout, half, UNLIMITED, replay)
    check_names(run.folder)
    found = check(run.folder, 8)
    assert summary(run.folder)["dropped"]["no signal"] >= 2  # and others came in their place
    assert set(types(run.folder)) == {"qwen3_moe"}
    assert all(point["actor/grad_norm"] > 0 for point in found)
    # Before any token is of two versions, both engines have the same weights.
    assert found[0]["mismatch/tokens"] > 0
    assert found[0]["mismatch/max"] < 1e-4
    if layout == EMBEDDED:  # whose trainer is on engine torch
        # It gives tokens to the rollouts' experts, which its own router would choose, too, but for rounding.
        assert found[0]["moe/routing_differs"] < 0.02
        assert all(point["moe/routing_differs"] < 0.5 and point["moe/load_max"] >= 1 for point in found)


def test_a_family_that_is_none_starts_nothing(tmp_path: Path) -> None:
    config = str(ROOT / "configs" / "gsm8k_qwen25_1_5b.yaml")
    ended = here("train", config, "model=tiny:gpt9", f"run.dir={tmp_path / 'run'}")
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: model: 'tiny:gpt9' is not a section of keys, nor one of tiny:deepseek_v3, ")
    assert len(ended.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()
