"""Whole runs of what an algorithm may need besides a policy: a critic, several updates a step, other prompts, adapters."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.system.runs import check_gone, one_line, started, steps, summary, trained, write_config
from tests.unit.training_steps import assert_metrics

pytestmark = pytest.mark.timeout(300)

RUN = 120.0
Rules = Callable[[str], dict[str, Any]]
PPO = {
    "algorithm": {"preset": "ppo", "kl_coefficient": 0.01},
    "critic": {"optimizer": {"learning_rate": 1e-3}},
    "training": {"steps": 4, "epochs": 2, "mini_batch_size": 2},
    "checkpoint": {"every": 2},
}
RULES = '''
from runtime.rewards.rules import rule


@rule("length")
def length(text, label, context):
    return float(sum(map(ord, text)) % 7)


@rule("half")
def half(text, label, context):
    """The same for all replies to every second prompt."""
    return 0.0 if int(label) % 2 else float(sum(map(ord, text)) % 7)
'''


@pytest.fixture
def rules(tmp_path: Path) -> Rules:
    """The `rewards` section with a rule that tells the replies of a random model apart."""
    path = tmp_path / "rules.py"
    path.write_text(RULES)
    return lambda name: {"rules": [{"name": f"{path}:{name}"}]}


def test_ppo_with_two_updates_a_mini_batch_goes_on_after_a_stop(tiny: Path, tmp_path: Path, rules: Rules) -> None:
    config = write_config(tmp_path / "config.yaml", tiny, rewards=rules("length"), **PPO)
    folder = tmp_path / "run"
    trained(config, folder=folder, timeout=RUN)
    trained(config, "training.steps=6", "run.resume=auto", folder=folder, timeout=RUN)
    points = steps(folder)
    assert [point["step"] for point in points] == [1, 2, 3, 4, 5, 6]
    for point in points:
        assert {"critic/vf_loss", "critic/grad_norm", "actor/pg_loss", "timing/update_critic"} <= point.keys()
        assert point["staleness/max"] <= 2
    # Values begin at 0, and approach the returns.
    assert abs(points[0]["critic/values/mean"]) < 0.1 * points[0]["critic/returns/mean"]
    assert points[-1]["critic/values/mean"] > points[0]["critic/values/mean"] + 0.05
    critic = folder / "checkpoints" / "step-00000006" / "critic" / "model"
    assert AutoModelForSequenceClassification.from_pretrained(critic).score.weight.abs().sum() > 0
    AutoModelForCausalLM.from_pretrained(folder / "model")


def test_two_ranks_of_trainer_and_critic_report_what_one_does(tiny: Path, tmp_path: Path, rules: Rules) -> None:
    """Without staleness, rewards that depend on the reply alone: the first step's batch is the same."""
    single, double = (
        trained(
            write_config(tmp_path / f"{ranks}.yaml", tiny, rewards=rules("length"), **PPO),
            "training.steps=1",
            "training.staleness=0",
            f"services.trainer.processes={ranks}",
            f"services.critic.processes={ranks}",
            folder=tmp_path / f"run-{ranks}",
            timeout=RUN,
        )
        for ranks in (1, 2)
    )
    (one,), (two,) = steps(single.folder), steps(double.folder)
    names = ("critic/returns/mean", "score/mean", "response_length/mean")
    names += ("critic/vf_loss", "critic/grad_norm", "actor/grad_norm", "actor/entropy")
    assert_metrics({name: two[name] for name in names}, {name: one[name] for name in names})


def test_a_critic_that_is_killed_and_may_not_be_started_again_is_named(tiny: Path, tmp_path: Path, rules: Rules) -> None:
    config = write_config(tmp_path / "config.yaml", tiny, rewards=rules("length"), **PPO)
    once = "services.critic.restarts.attempts=0"
    with started(config, "training.steps=100000", once, folder=tmp_path / "run") as run:
        run.reaches(2)
        run.member("critic-0").kill()
        assert run.wait(RUN) == 1
        assert "critic-0" in run.output + run.errors
        check_gone(run.folder)


def test_groups_without_signal_are_replaced(tiny: Path, tmp_path: Path, rules: Rules) -> None:
    algorithm = {"preset": "dapo", "dynamic_sampling_limit": 1000}
    config = write_config(tmp_path / "config.yaml", tiny, algorithm=algorithm, rewards=rules("half"))
    run = trained(config, "algorithm.kl_coefficient=0", folder=tmp_path / "run", timeout=RUN)
    told = summary(run.folder)
    assert told["steps"] == 4
    assert told["groups"]["retired"] == 16
    assert told["dropped"]["no signal"] >= 4
    for point in steps(run.folder):
        assert point["actor/grad_norm"] > 0
        assert point["staleness/max"] <= 2


def test_adapters_alone_are_trained_against_the_policy_without_them(tiny: Path, tmp_path: Path, rules: Rules) -> None:
    config = write_config(
        tmp_path / "config.yaml",
        tiny,
        rewards=rules("length"),
        lora={"rank": 4},
        reference={"mode": "adapter_off"},
        checkpoint={"every": 2},
        training={"steps": 4, "optimizer": {"learning_rate": 0.01}},
    )
    trained(config, folder=tmp_path / "run", timeout=RUN)
    run = trained(config, "training.steps=6", "run.resume=auto", folder=tmp_path / "run", timeout=RUN)
    assert not list((run.folder / "logs").glob("reference*"))
    adapters = load_file(run.folder / "model" / "adapter" / "adapter_model.safetensors")
    assert all("lora_" in name for name in adapters)
    assert any(tensor.abs().sum() > 0 for name, tensor in adapters.items() if "lora_B" in name)
    before, after = (load_file(folder / "model" / "model.safetensors") for folder in (tiny, run.folder))
    changed = {name for name, tensor in after.items() if not tensor.equal(before[name])}
    assert changed
    assert all("_proj" in name for name in changed)
    points = steps(run.folder)
    assert points[-1]["actor/kl"] > 0
    sent = sum(tensor.nbytes for tensor in adapters.values())
    for point in points:  # rollouts get the adapters alone, before and after the stop, and serve what is trained
        assert sent <= point["publication/bytes"] < 1.5 * sent
        assert point["mismatch/abs_logprob"] < 1e-4
    other = shutil.copytree(tiny / "model", tmp_path / "other")
    name = min(changed)
    save_file(before | {name: before[name] + 1}, other / "model.safetensors", metadata={"format": "pt"})
    with started(config, f"model.path={other}", "training.steps=9", "run.resume=auto", folder=run.folder) as refused:
        assert refused.wait(RUN) == 2
        both = [rf"{path} \(fingerprint \w+\)" for path in (other, tiny / "model")]
        told = rf"error: model\.path: {both[0]} is not what the adapters of .* were trained on, which is {both[1]}"
        assert re.search(told, one_line(refused.errors)), refused.errors
        check_gone(run.folder)
