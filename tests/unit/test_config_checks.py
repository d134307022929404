"""Configuration: what the cross-checks between keys see without torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from runtime.config import Config
from runtime.config.checks import semantic_faults
from runtime.config.loading import resolve
from tests.unit.config_cases import PPO, TWO_ROLLOUTS, checked


def test_a_sound_configuration_has_no_faults(sound: dict[str, Any]) -> None:
    assert checked(sound) == []
    assert checked(sound, available_bytes=None) == []


def test_dynamic_sampling_needs_rewards_that_can_differ(sound: dict[str, Any]) -> None:
    algorithm = {"advantage": "reinforce_plus_plus", "dynamic_sampling": True}
    raw = sound | {"sampling": {"group_size": 1, "max_new_tokens": 64}, "algorithm": algorithm}
    (fault,) = semantic_faults(resolve(msgspec.convert(raw, Config)), {}, 1 << 40)
    assert fault.startswith("sampling.group_size: 1 is too few; algorithm.dynamic_sampling needs at least 2")


def test_several_sources_are_checked_one_by_one(sound: dict[str, Any], tmp_path: Path) -> None:
    path = sound["data"]["train"]
    train = [{"path": path}, {"path": str(tmp_path), "weight": 2, "handler": "plain"}]
    assert checked(sound, data={"train": train}) == []  # a folder is a source too
    assert checked(sound, data={"train": [*train, {"path": path, "handler": "other"}]}) == [
        "data.train.2.handler: 'other' is not one of plain, nor FILE.py:NAME",
        f"data.train.2.path: '{path}' is there twice; give it more weight instead",
    ]
    (fault,) = checked(sound, data={"train": []})
    assert fault.startswith("data.train: missing")


def test_a_chat_template_has_a_use_with_the_model_s_own_type_only(sound: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("x")
    model = {"chat_template": str(tmp_path / "t.jinja")}
    assert checked(sound, model=model) == []
    (fault,) = checked(sound, model=model, data={"prompt_type": "qwen"})
    assert fault == "model.chat_template: has no use with data.prompt_type qwen, only with model"


def test_a_warmup_names_model_and_data_later() -> None:
    raw: dict[str, Any] = {"run": {"name": "a"}, "warmup": {}, "rewards": {"rules": [{"name": "accuracy"}]}}
    raw |= {"data": {"max_prompt_tokens": 256}, "sampling": {"max_new_tokens": 256}}
    assert checked(raw, evaluation={"every": 5}, algorithm={"kl_coefficient": 0.1}) == []
    assert checked(raw, warmup={"hidden_size": 100, "heads": 3, "kv_heads": 2}) == [
        "warmup.hidden_size: 100 is not a multiple of 2 · heads = 6",
        "warmup.kv_heads: 2 does not divide heads = 3",
    ]
    assert checked(raw, evaluation={"max_new_tokens": 256}, sampling={"max_new_tokens": 257}) == [
        "sampling.max_new_tokens: 257 and data.max_prompt_tokens 256 exceed the model's 512 positions"
    ]


def test_sound_steps_of_several_updates(sound: dict[str, Any]) -> None:
    assert checked(sound, **PPO) == []
    shared = {"trainer": {"processes": 2}, "critic": {"processes": 4}}
    assert checked(sound, **PPO, training={"mini_batch_size": 4, "epochs": 2}, services=shared) == []
    assert checked(sound, services={"critic": {"processes": 3}}) == []  # there is none
    assert checked(sound, reference={"mode": "none"}) == []
    assert checked(sound, reference={"mode": "adapter_off"}, lora={}, algorithm={"kl_coefficient": 0.1}) == []


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"run": {"name": "a/b"}}, "run.name: 'a/b' is not the name of a folder"),
        (
            {"run": {"resume": "/no/where"}},
            "run.resume: '/no/where' is not a checkpoint's folder; never and auto are allowed besides",
        ),
        ({"model": {"path": "/no/model"}}, "model.path: '/no/model' is not a folder"),
        ({"model": {"path": ""}}, "model.path: missing"),
        ({"model": {"reference": "/no/ref"}}, "model.reference: '/no/ref' is not a folder"),
        ({"model": {"chat_template": "/no/t.jinja"}}, "model.chat_template: '/no/t.jinja' is not a file"),
        ({"data": {"train": ""}}, "data.train: missing"),
        ({"data": {"train": "/no/x.jsonl"}}, "data.train: '/no/x.jsonl' is not a file"),
        ({"data": {"eval": "/no/y.jsonl"}}, "data.eval: '/no/y.jsonl' is not a file"),
        ({"data": {"handler": "other"}}, "data.handler: 'other' is not one of plain, nor FILE.py:NAME"),
        ({"data": {"handler": "/no/own.py:x"}}, "data.handler: '/no/own.py' is not a file"),
        ({"data": {"train": [{"path": "/no/x.jsonl"}]}}, "data.train.0.path: '/no/x.jsonl' is not a file"),
        ({"data": {"prompt_type": "qwen9"}}, "data.prompt_type: 'qwen9' is not one of model, deepseek3, "),
        ({"data": {"prompt_type_path": "/no.json"}}, "data.prompt_type_path: /no.json: no such file or directory"),
        ({"evaluation": {"every": 5}}, "data.eval: missing; evaluation.every is 5"),
        (
            {"evaluation": {"max_new_tokens": 65}},
            "evaluation.max_new_tokens: 65 and data.max_prompt_tokens 64 exceed the model's 128",
        ),
        (
            {"evaluation": {"sets": [{"name": "a", "path": "/no/z.jsonl"}]}},
            "evaluation.sets.0.path: '/no/z.jsonl' is not a file",
        ),
        ({"sampling": {"group_size": 1}}, "sampling.group_size: 1 is too few; algorithm.advantage group_norm needs at least 2"),
        ({"algorithm": {"advantage": "gea"}}, "algorithm.advantage: 'gea' is not one of gae, group_norm, rloo, nor"),
        ({"algorithm": {"kl": "k9", "kl_coefficient": 1}}, "algorithm.kl: 'k9' is not one of k1, k3"),
        ({"algorithm": {"dual_clip": 0.5}}, "algorithm.dual_clip: 0.5 is not 0 (off) or > 1"),
        ({"algorithm": {"correction": "tis"}}, "algorithm.correction: 'tis' is not one of icepop, none, nor FILE.py:NAME"),
        ({"algorithm": {"loss": "/no/mine.py:own"}}, "algorithm.loss: '/no/mine.py' is not a file"),
        (
            {"algorithm": {"correction": "icepop"}},
            "algorithm.correction: 'icepop' with loss decoupled would weigh by proximal / behaviour twice; take loss ppo, or",
        ),
        (
            {"algorithm": {"loss": "m2po", "correction": "icepop"}},
            "algorithm.correction: 'icepop' with loss m2po would leave it ratios of 1; take loss ppo, or correction none",
        ),
        (
            {"algorithm": {"loss": "ppo", "correction": "icepop", "correction_low": 1.5}},
            "algorithm.correction_low: [1.5, 5] leaves out 1, the weight where both engines agree",
        ),
        (
            {"algorithm": {"loss": "gspo"}},
            "algorithm.aggregation: 'token_mean' is not seq_mean_token_mean, nor seq_mean_token_sum; loss gspo is one value a",
        ),
        (
            {"algorithm": {"loss": "clip_cov", "covariance_low": 5}},
            "algorithm.covariance_low: 5 is not below covariance_high 5",
        ),
        ({"algorithm": {"kl_target": 0.1}}, "algorithm.kl_target: needs kl_coefficient > 0 to start from"),
        (
            {"algorithm": {"kl_importance_weighted": True, "kl_placement": "reward"}},
            "algorithm.kl_importance_weighted: true is for kl_placement loss",
        ),
        (
            {"sampling": {"group_size": 1}, "algorithm": {"advantage": "rloo"}},
            "sampling.group_size: 1 is too few; algorithm.advantage rloo needs at least 2",
        ),
        ({"rewards": {"rules": []}}, "rewards.rules: empty"),
        (
            {"rewards": {"rules": [{"name": "format"}, {"name": "z"}]}},
            "rewards.rules.1.name: 'z' is not one of accuracy, format",
        ),
        (
            {"training": {"optimizer": {"min_learning_rate": 1}}},
            "training.optimizer.min_learning_rate: 1 is above learning_rate 1e-06",
        ),
        ({"stop": {"accuracy": 0.9}}, "stop.accuracy: needs evaluation.every >= 1"),
        (
            {"services": {"trainer": {"processes": 3}}},
            "services.trainer.processes: 3 does not divide training.groups_per_step = 8",
        ),
        (
            {"training": {"mini_batch_size": 3}},
            "training.mini_batch_size: 3 does not divide groups_per_step = 8",
        ),
        ({"training": {"mini_batch_size": 16}}, "training.mini_batch_size: 16 does not divide groups_per_step = 8"),
        (
            {"training": {"mini_batch_size": 2}, "services": {"trainer": {"processes": 4}}},
            "services.trainer.processes: 4 does not divide training.mini_batch_size = 2",
        ),
        (
            {"reference": {"mode": "none"}, "algorithm": {"kl_coefficient": 0.1}},
            "reference.mode: none leaves the KL term of algorithm.kl_coefficient 0.1 without its reference",
        ),
        ({"reference": {"mode": "adapter_off"}}, "reference.mode: adapter_off needs a lora section"),
        ({"algorithm": {"advantage": "gae"}}, "critic: missing; algorithm.advantage gae needs one"),
        (
            {"critic": {}},
            "critic: there is one, but algorithm.advantage group_norm takes no values; leave the section out",
        ),
        ({**PPO, "critic": {"path": "/no/critic"}}, "critic.path: '/no/critic' is not a folder"),
        (
            {**PPO, "critic": {"optimizer": {"learning_rate": 0.5, "min_learning_rate": 1}}},
            "critic.optimizer.min_learning_rate: 1 is above learning_rate 0.5",
        ),
        (
            {**PPO, "services": {"critic": {"processes": 3}}},
            "services.critic.processes: 3 does not divide training.groups_per_step = 8",
        ),
        (
            {**PPO, "training": {"mini_batch_size": 2}, "services": {"critic": {"processes": 8}}},
            "services.critic.processes: 8 does not divide training.mini_batch_size = 2",
        ),
        ({"services": {"reward": {"python": "/no/python"}}}, "services.reward.python: '/no/python' is not an executable"),
        ({"services": {"rollout": []}}, "services.rollout: an empty list; at least one fleet is needed"),
        (
            {
                "publication": {"backend": "nccl", "transport": "collective"},
                "services": {"trainer": {"devices": [0]}, "rollout": TWO_ROLLOUTS},
            },
            "publication.backend: nccl takes one member a device, but trainer-0 and rollout-0 have 0; must be backend gloo",
        ),
        (
            {"publication": {"transport": "collective"}, "services": {"trainer": {"devices": [1]}, "rollout": TWO_ROLLOUTS}},
            "publication.transport: collective takes one member a device, but trainer-0 and rollout-1 have 1; must be backend",
        ),
        (
            {"services": {"rollout": [{}, {"python": "/no/.venv-vllm/bin/python"}]}},
            "services.rollout.1.python: '/no/.venv-vllm/bin/python' is not an executable; run make install-vllm",
        ),
        (
            {"publication": {"transport": "files"}},
            "publication.folder: missing; transport files needs a folder that trainer and rollouts share",
        ),
        (
            {"publication": {"transport": "files", "folder": "weights", "senders": "all"}},
            "publication.senders: all is not for transport files, whose folder one process writes; must be one",
        ),
        (
            {"publication": {"transport": "files", "folder": "/dev/null/weights"}},
            "publication.folder: '/dev/null/weights' cannot be made, as /dev/null is a file",
        ),
        (
            {"publication": {"transport": "files", "folder": "/tmp", "backend": "gloo"}},
            "publication.backend: gloo is for a collective; transport files has none, so must be auto",
        ),
        (
            {"publication": {"encoding": "delta", "folder": "/tmp", "dtype": "bfloat16"}},
            "publication.folder: '/tmp' is for transport files alone, and it is auto",
        ),
        ({"publication": {"full_every": 7}}, "publication.full_every: 7 is for encoding delta alone, and it is whole"),
    ],
)
def test_each_cross_check(sound: dict[str, Any], changes: dict[str, Any], fault: str) -> None:
    (found,) = checked(sound, **changes)
    assert found.startswith(fault)


def test_rules_of_ones_own(sound: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("")
    assert checked(sound, rewards={"rules": [{"name": f"{tmp_path}/mine.py:own"}]}) == []
    (fault,) = checked(sound, rewards={"rules": [{"name": "/no/yours.py:own"}]})
    assert fault == "rewards.rules.0.name: '/no/yours.py' is not a file"


def test_functions_of_ones_own(sound: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("")
    own = f"{tmp_path}/mine.py:own"
    names = dict.fromkeys(("advantage", "loss", "correction", "aggregation", "kl"), own)
    assert checked(sound, algorithm=names) == []


def test_a_tracker_without_its_package(sound: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = msgspec.convert(sound | {"trackers": [{"name": "jsonl"}, {"name": "wandb"}]}, Config)
    assert semantic_faults(config, available_bytes=1 << 40) == [
        "trackers.1.name: wandb needs a package: pip install 'sluice-rl[wandb]'"
    ]


@pytest.mark.parametrize(("platform", "how"), [("", "run make install-vllm"), ("ascend", "install vllm-ascend")])
def test_how_vllm_is_installed_depends_on_the_machine(
    sound: dict[str, Any], monkeypatch: pytest.MonkeyPatch, platform: str, how: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (fault,) = checked(sound, services={"platform": platform, "rollout": {"engine": "vllm"}})
    assert fault.startswith(f"services.rollout.engine: vllm is not installed here; {how}, and name its interpreter in ")


def test_moments_of_8_bits_need_a_package(sound: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.config.checks._has", lambda package: package != "torchao")
    small = {"optimizer": {"name": "adamw_8bit"}}
    needs = "adamw_8bit needs a package: pip install 'sluice-rl[torchao]'"
    assert checked(sound, training=small) == [f"training.optimizer.name: {needs}"]
    critic = {"algorithm": {"advantage": "gae"}, "critic": small}
    assert checked(sound, **critic) == [f"critic.optimizer.name: {needs}"]
    elsewhere = {"critic": {"python": sys.executable}}
    assert checked(sound, **critic, services=elsewhere) == []
    monkeypatch.undo()
    monkeypatch.setattr("runtime.config.checks._has", lambda package: True)
    assert checked(sound, training=small) == []
