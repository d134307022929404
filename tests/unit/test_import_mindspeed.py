"""`sluice import-mindspeed`: what is written, what is said of each key, and what is refused.

`mindspeed/*.yaml` are files in MindSpeed-RL's formats with its published settings; `mindspeed/expected` has what is made of
them. To renew these after a change: remove them, and import each file again with --output and --report. Single keys are
translated beside them; `mindspeed/declared.json` has those that MindSpeed-RL declares.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec import inspect

from launcher import cli
from launcher.commands import options
from launcher.importing.keys import FileEntry, Read, TranslatedKey, Translation
from launcher.mindspeed.reading import TABLE
from launcher.mindspeed.translate import ASCEND, translate
from launcher.node.local_node import LocalNode
from runtime.config import Config, loading, model_checks
from runtime.config.loading import load
from runtime.errors import ConfigError
from runtime.models.tiny_model import write_tokenizer
from runtime.process.os_process import CommandParser
from tests.unit.config_cases import cases, configured, paths
from tests.unit.model_dimensions import CONFIGS

FILES = Path(__file__).parent / "mindspeed"
ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guides" / "migration.md"
EXPECTED = FILES / "expected"
MODELS = {
    "grpo_qwen25_7b": "qwen25_7b",
    "ppo_qwen25_32b": "qwen25_32b",
    "dapo_qwen3_32b": "qwen3_32b",
    "r1_zero_qwen25_7b": "qwen25_7b",
}


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as end:
        cli.main([str(argument) for argument in arguments])
    assert isinstance(end.value.code, int)
    return end.value.code


def imported(file: Path, folder: Path, *options: object) -> Config:
    output = folder / "ours.yaml"
    assert run("import-mindspeed", file, "--output", output, *options) == 0
    return load(output)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the files, to be changed."""
    shutil.copytree(FILES, tmp_path / "theirs")
    return tmp_path / "theirs"


def changed(file: Path, *changes: tuple[str, str]) -> Path:
    text = file.read_text(encoding="utf-8")
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new, 1)
    file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.parametrize("name", MODELS)
def test_the_file_and_the_report_are_those_expected(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report has every key of the file, counted by the indentation of its lines, with a reason; what is made is valid with
    a model's description in the place of its folder, problems in that of the prepared data, and devices."""
    output, report = tmp_path / "ours.yaml", tmp_path / "report.md"
    assert run("import-mindspeed", FILES / f"{name}.yaml", "--output", output, "--report", report) == 0
    assert output.read_text(encoding="utf-8") == (EXPECTED / f"{name}.yaml").read_text(encoding="utf-8")
    assert report.read_text(encoding="utf-8") == (EXPECTED / f"{name}.md").read_text(encoding="utf-8")
    told = capsys.readouterr().out
    assert f"next: sluice validate {output}" in told
    assert re.search(r"^\d+ keys: \d+ mapped, (\d+ to decide, )?\d+ ignored, 0 refused, 0 left out$", told, re.MULTILINE)

    text = (FILES / f"{name}.yaml").read_text(encoding="utf-8")
    keys = re.findall(r"^ +([\w-]+): *\S", text[text.index("\n\n") :], re.MULTILINE)
    rows = r"^\| (\S+) \| .* \| (?:mapped|to decide|ignored) \| (.*) \|$"
    table = re.findall(rows, report.read_text(encoding="utf-8"), re.MULTILINE)
    own = [path for path, _ in table if not path.startswith("model.")]
    assert [path.rpartition(".")[2] for path in own] == [key.replace("-", "_") for key in keys]
    assert [path for path, reason in table if not reason or "decides nothing here" in reason] == []

    monkeypatch.setattr(model_checks, "_installed", lambda: True)
    monkeypatch.setattr(LocalNode, "memory", lambda self, config: None)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIGS[MODELS[name]]))
    write_tokenizer(model)
    (model / "model.safetensors").touch()
    (tmp_path / "train.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    named = [f"model.path={model}", f"model.reference={model}", *([f"critic.path={model}"] if name.startswith("ppo") else [])]
    named += [f"data.train={tmp_path / 'train.jsonl'}", f"services.rollout.python={sys.executable}"]
    assert run("validate", output, *named, "trackers=[{name: jsonl}]") == 0  # the package of the other need not be installed


def test_dashes_and_underscores_are_alike(folder: Path, tmp_path: Path) -> None:
    file = folder / "grpo_qwen25_7b.yaml"
    dashed = r"^( *)([a-z][\w]*):", lambda match: match[1] + match[2].replace("_", "-") + ":"
    text = re.sub(*dashed, file.read_text(), flags=re.M)
    assert "seq-length:" in text
    file.write_text(text)
    assert imported(file, tmp_path) == load(EXPECTED / "grpo_qwen25_7b.yaml")


def test_models_may_lie_elsewhere(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "model").rename(tmp_path / "networks")
    output = tmp_path / "ours.yaml"
    assert run("import-mindspeed", folder / "grpo_qwen25_7b.yaml", "--output", output) == 2
    line = capsys.readouterr().err.splitlines()[0]
    assert "defaults: model qwen25_7b: there is no " in line
    assert "--models" in line
    assert imported(folder / "grpo_qwen25_7b.yaml", tmp_path, "--models", tmp_path / "networks") == load(
        EXPECTED / "grpo_qwen25_7b.yaml"
    )


def test_what_is_refused_can_be_left_out_knowingly(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = changed(
        folder / "grpo_qwen25_7b.yaml",
        ("top_p: 1.0", "top_p: 0.9"),
        ("guarantee_order: false", "multi_turn_enable: true\n  max_tool_calls: 3"),
    )
    output, report = tmp_path / "ours.yaml", tmp_path / "report.md"
    assert run("import-mindspeed", file, "--output", output) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1] for line in lines[:2]] == [
        "rl_config.multi_turn_enable",
        "generate_config.sampling_config.top_p",
    ]
    assert lines[2] == "error: --without multi_turn_enable,top_p leaves out what is refused"
    assert not output.exists()

    options = ["--output", output, "--report", report, "--without", "multi_turn_enable,top-p"]
    assert run("import-mindspeed", file, *options) == 0
    assert load(output) == load(EXPECTED / "grpo_qwen25_7b.yaml")
    rows = report.read_text().splitlines()
    assert "| rl_config.multi_turn_enable | true | left out | --without |" in rows
    assert "| rl_config.max_tool_calls | 3 | ignored | of multi_turn_enable |" in rows
    assert "Left out by --without: rl_config.multi_turn_enable" in output.read_text()
    assert "0 refused, 2 left out" in output.read_text()


@pytest.mark.parametrize("change", ["is_pairwise_dataset: true", "mm_model: qwen2vl"])
def test_what_says_what_is_trained_cannot_be_left_out(
    change: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, name = folder / "grpo_qwen25_7b.yaml", change.partition(":")[0]
    changed(folder / "model" / "qwen25_7b.yaml", ("qwen25_7b:\n", f"qwen25_7b:\n  {change}\n"))
    changed(file, ("top_p: 1.0", "top_p: 0.9"))
    output, key = tmp_path / "ours.yaml", f"model.qwen25_7b.{name}"
    assert run("import-mindspeed", file, "--output", output) == 2
    lines = capsys.readouterr().err.splitlines()
    assert any(line.startswith(f"error: {key}: ") and ": refused: " in line for line in lines)
    assert lines[-1] == "error: --without top_p leaves out what may be left out"
    assert run("import-mindspeed", file, "--output", output, "--without", f"{name},top_p") == 2
    said = f"error: --without {name}: {key} says what is trained, and cannot be left out"
    assert capsys.readouterr().err.splitlines() == [said] and not output.exists()


BAD = r"""
gamma: 1.0 => gama: 1.0 => rl_config.gama: unknown key; nearest is gamma
rl_config: => rl_confg: => rl_confg: unknown section; nearest is rl_config
train_iters: 500 => train_iters: many => megatron_training.train_iters: many is not a whole number
    num_npus: 16 =>     npus: 16 => rl_config.actor_resource.npus: unknown key; nearest is actor_resource.num_npus
mini_batch_size: 32 => mini_batch_size: 12 => rl_config.mini_batch_size: 12: does not divide the 32 prompts of a step
num_npus: 16 => num_npus: 12 => num_npus: 12: makes 3 data-parallel blocks, among which the 32 prompts
infer_tensor_parallel_size: 2 => infer_tensor_parallel_size: 3 => infer_tensor_parallel_size: 3: does not divide
seq_length: 4096 => seq_length: 2048 => megatron_training.seq_length: 2048: leaves no room for a reply behind
[1.0, 0.2] => [1.0] => rl_config.verifier_weight: has 1 weights for the 2 of verifier_function
math_17k_acc => math_17_acc => math_17_acc is no verifier; nearest is math_17k_acc. MindSpeed-RL passes over it
kl_penalty: low_var_kl => kl_penalty: full => rl_config.kl_penalty: full: refused: must be one of kl, abs, mse,
init_kl_coef: 0.001 => init_kl_coef: -1.0 => rl_config.init_kl_coef: algorithm.kl_coefficient: -1.0 is not a finite
model: qwen25_7b\n  stage => model: qwen3_8b\n  stage => megatron_training.model: qwen3_8b is no model of `defaults`
      - qwen25_7b =>       - qwen9 => defaults: model qwen9: there is no 
  - model:\n      - qwen25_7b =>   - trainer: x => defaults: {trainer: x}: only
./Qwen2.5-7B => ${oc.env:HOME}/Qwen => tokenizer_name_or_path: ${oc.env:HOME}/Qwen: is not resolved here
seed: 1 => seed: 1\n  max_tokens_to_oom: 1\n  max-tokens-to-oom: 2 => max_tokens_to_oom: occurs twice, with dashes
rl_config: => algorithm: {}\nrl_config: => has sections of both formats, megatron_training and algorithm
"""
OLDER_BAD = r"""
[6, 8] => [6, 6] => resource_pool.actor_rollout: 12 devices, but num_gpus_for_train 8 + num_gpus_for_infer 6 are 14
num_gpus_for_infer: 6 => num_gpus_for_infer: 7 => [6, 8] => [7, 8] => num_gpus_for_infer: 7: is not a multiple of
verifier: true => verifier: false => reward: [] => reward: [2] =>   load: ./ckpt/orm\n =>  => which no section
do_sample: true => do_sample: false => actor_rollout_ref.actor_rollout.do_sample: false: refused: replies are always
  ref:\n =>   rev:\n => actor_rollout_ref.rev: unknown section; allowed are actor_rollout, ref
./dataset/pe-nlp/data => 1,./a,./b => data_path: 1,./a,./b: is not WEIGHT,PREFIX,WEIGHT,PREFIX,...
"""
MISTAKES = [("grpo_qwen25_7b", line) for line in BAD.strip("\n").splitlines()]
MISTAKES += [("r1_zero_qwen25_7b", line) for line in OLDER_BAD.strip("\n").splitlines()]


@pytest.mark.parametrize(("name", "line"), MISTAKES)
def test_a_mistake_is_a_line_and_nothing_is_written(
    name: str, line: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    *changes, part = (each.replace("\\n", "\n") for each in line.split(" => "))
    file, output, report = folder / f"{name}.yaml", tmp_path / "ours.yaml", tmp_path / "report.md"
    changed(file, *zip(changes[::2], changes[1::2], strict=True))
    assert run("import-mindspeed", file, "--output", output, "--report", report) == 2
    told = capsys.readouterr()
    lines = told.err.splitlines()
    hinted = any(": refused: " in each for each in lines) and ".stage: " not in part
    assert part in lines[0] and all(each.startswith("error: ") for each in lines)
    assert len(lines) == 1 + hinted or name.startswith("r1_zero"), told.err
    assert told.out == "" and not output.exists() and not report.exists()


def test_files_that_cannot_be_read_or_written(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there, good = tmp_path / "there.yaml", folder / "grpo_qwen25_7b.yaml"
    there.write_text("mine")
    (tmp_path / "other.yaml").write_text("a: 1\n")
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "bare.yaml").write_text("rl_config:\n")
    (tmp_path / "prepare.yaml").write_text("input: a\noutput_prefix: b\nhandler_name: c\n")
    cases: dict[str, tuple[Any, ...]] = {
        "nothing.yaml: no such file": (tmp_path / "nothing.yaml", "--output", tmp_path / "o.yaml"),
        "has neither MindSpeed-RL's sections": (tmp_path / "other.yaml", "--output", tmp_path / "o.yaml"),
        "its sections have no keys": (tmp_path / "bare.yaml", "--output", tmp_path / "o.yaml"),
        "holds a list, not a mapping": (tmp_path / "list.yaml", "--output", tmp_path / "o.yaml"),
        "is a file of preprocess_data": (tmp_path / "prepare.yaml", "--output", tmp_path / "o.yaml"),
        "there.yaml' exists; must be a new file": (good, "--output", there),
        "nowhere' is not a folder": (good, "--output", tmp_path / "nowhere" / "o.yaml"),
        "is --output too": (good, "--output", tmp_path / "o.yaml", "--report", tmp_path / "o.yaml"),
        "--models: ": (good, "--output", tmp_path / "o.yaml", "--models", tmp_path / "nowhere"),
        "--without gamut: the file has no such key": (good, "--output", tmp_path / "o.yaml", "--without", "gamut"),
    }
    before = sorted(tmp_path.rglob("*"))
    for part, arguments in cases.items():
        assert run("import-mindspeed", *arguments) == 2
        assert part in capsys.readouterr().err
        assert sorted(tmp_path.rglob("*")) == before
    assert there.read_text() == "mine"


def test_each_command_says_of_the_others_file_whose_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = tmp_path / "ours.yaml"
    ours.write_text("run: {name: a}\nalgorithm: {preset: grpo}\n")
    assert run("import-mindspeed", ours, "--output", tmp_path / "out.yaml") == 2
    assert capsys.readouterr().err.splitlines() == [
        f"error: {ours}: is a configuration of Sluice's own, with a section run; sluice validate reads it"
    ]
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text("megatron_training: {train_iters: 1}\n")
    assert run("validate", theirs) == 2
    assert "sluice import-mindspeed makes a configuration of it" in capsys.readouterr().err


BASE: dict[str, dict[str, Any]] = {
    "megatron_training": {"tokenizer_name_or_path": "m", "global_batch_size": 32, "seq_length": 1024, "stage": "ray_grpo"},
    "actor_config": {"lr": 1e-6, "micro_batch_size": 2},
    "rl_config": {"max_prompt_length": 512, "n_samples_per_prompt": 4, "actor_resource.num_npus": 8},
    "generate_config": {"infer_tensor_parallel_size": 1, "sampling_config.temperature": 1.0},
}


OLDER: dict[str, dict[str, Any]] = {
    "training": {"global_batch_size": 8, "seq_length": 1024},
    "actor_rollout_ref.actor_rollout": {"num_gpus_for_train": 2, "num_gpus_for_infer": 2, "max_prompt_length": 512},
    "algorithm": {"verifier_function": ["acc"], "verifier_weight": [1.0]},
    "reward": {"verifier": True},
}


def made(
    without: tuple[str, ...] = (), model: Mapping[str, Any] | None = None, older: bool = False, **changes: Any
) -> Translation:
    """What becomes of BASE, or OLDER, with changes by section and what a model's file says."""
    base = OLDER if older else BASE
    sections = {name: dict(base.get(name, {})) | dict(changes.get(name, {})) for name in [*base, *changes]}
    if model:
        next(iter(sections.values()))["model"] = "m"
    entries = [FileEntry(section, name, value) for section, keys in sections.items() for name, value in keys.items()]
    entries += [FileEntry("model", name, value, model="m") for name, value in (model or {}).items()]
    return translate(Read(name="a", format="r1_zero" if older else "current", entries=tuple(entries)), without)


def at(translation: Translation, path: str) -> Any:
    """The value written at `path`; None where our default stays."""
    node: Any = translation.raw
    for part in path.split("."):
        node = node.get(part, {}) if isinstance(node, dict) else {}
    return None if node == {} else node


def row(translation: Translation, path: str) -> TranslatedKey:
    return next(row for row in translation.rows if row.path == path)


def refused(**changes: Mapping[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as error:
        made(**changes)
    return error.value.faults


TRANSLATED = """
megatron_training: {data_path: ./a/data.jsonl} => data.train: ./a/data.jsonl
megatron_training: {data_path: '2,./a,0.5,./b.json'}
  => data.train: [{path: ./a.parquet, weight: 2.0}, {path: ./b.json, weight: 0.5}]
megatron_training: {handler_name: R1AlpacaStyleInstructionHandler, map_keys: {prompt: q, query: '', response: a, system: ''}}
  => data.handler: r1, data.columns: {prompt: q, query: '', label: a, system: ''}
megatron_training: {dataset_additional_keys: [labels, level]} => data.additional_keys: [level]
megatron_training: {no_shared_storage: true} => cluster.shared_folder: false
older: true => rewards.rules: [{name: r1_zero_acc}]
older: true, algorithm: {verifier_function: [step]} => rewards.rules: [{name: step}]
older: true, reward: {verifier: false, load: orm}, resource_pool: {actor_rollout: [4], reward: [2, 1], ref: [2]}
  => rewards: {model: {path: orm}}, services.reward_model.replicas: 3, services.reference.processes: 2
rl_config: {init_kl_coef: 0.01}
  => training.optimizer.schedule: linear, training.optimizer.weight_decay: 0.01, algorithm.clip_high: 0.2
rl_config: {kl_penalty: kl} => algorithm.kl: k1
rl_config: {kl_penalty: low_var_kl} => algorithm.kl: null
megatron_training: {stage: ray_grpo}
  => algorithm.kl_placement: null, algorithm.kl_coefficient: 0.01, rewards.rules: [{name: base_acc}]
megatron_training: {stage: ray_ppo}, rl_config: {adv_estimator: gae, use_kl_in_reward: true}, critic_config: {lr: 1e-5}
  => algorithm.kl_placement: reward, algorithm.kl_coefficient: 0.01, services.reference.colocate: trainer
megatron_training: {stage: ray_ppo}, rl_config: {adv_estimator: gae}, critic_config: {lr: 1e-5}
  => algorithm.kl_placement: null, algorithm.kl_coefficient: null, services.reference.colocate: null
rl_config: {mini_batch_size: 8} => training.mini_batch_size: 8
older: true, actor_rollout_ref.actor_rollout: {ppo_mini_batch_size: 16, n_samples_per_prompt: 4} => training.mini_batch_size: 4
older: true, actor_rollout_ref.actor_rollout: {ppo_mini_batch_size: 64, n_samples_per_prompt: 4}
  => training.mini_batch_size: null
rl_config: {use_dynamic_bsz: true, max_packing_token_size: 9000} => training.max_tokens_per_microbatch: 4096
rl_config: {use_dynamic_bsz: true, max_packing_token_size: 9000, update_max_packing_token_size: 7000}
  => training.max_tokens_per_microbatch: 7000
rl_config: {max_tokens_to_oom: 12000, use_dynamic_bsz: true} => training.max_tokens_per_microbatch: 12000
older: true, actor_rollout_ref.actor_rollout: {micro_batch_size: 2, max_tokens_to_oom: 1000000}
  => training.max_tokens_per_microbatch: 2048
rl_config: {use_dynamic_bsz: true, ref_max_packing_token_size: 7000, ref_forward_micro_batch_size: 3}
  => services.reference.max_tokens_per_microbatch: 7000
rl_config: {n_samples_per_prompt: 4}
  => services.rollout.colocate: trainer, services.reference: {colocate: trainer, processes: 8, engine: megatron}
rl_config: {use_integrated_worker: false, blocking: false, reference_resource.num_npus: 4},
  ref_config: {tensor_model_parallel_size: 2, micro_batch_size: 3}
  => services.reference: {processes: 4, engine: megatron, parallel: {tensor: 2}, max_tokens_per_microbatch: 3072},
  services.rollout.colocate: trainer, training.staleness: 0
actor_config: {pipeline_model_parallel_size: 4, num_layer_list: '9,10,10,7'}
  => services.trainer.parallel: {pipeline: 4, layers_per_stage: [9, 10, 10, 7]}
actor_config: {pipeline_model_parallel_size: 4, num_layers: 40, noop_layers: '3,13,23,33'}
  => services.trainer.parallel: {pipeline: 4}
actor_config: {pipeline_model_parallel_size: 4, num_layer_list: '10,10,10,10', noop_layers: '0,1'}
  => services.trainer.parallel: {pipeline: 4, layers_per_stage: [8, 10, 10, 10]}
actor_config: {lora_target_modules: [linear_qkv, linear_fc2], lora_r: 128, lora_alpha: 64},
  megatron_training: {tensor_model_parallel_size: 4}, rl_config: {share_backbone: true}
  => lora: {rank: 128, alpha: 64.0, target_modules: [q_proj, k_proj, v_proj, down_proj]}, reference.source: adapter_off,
  services.trainer: {processes: 8, engine: megatron, parallel: {tensor: 4}}
rl_config: {use_tensorboard: false} => trackers: [{name: jsonl}]
rl_config: {use_wandb: true, use_tensorboard: false} => trackers: [{name: jsonl}, {name: wandb, mode: online}]
rl_config: {use_swanlab: true, swanlab_mode: local, swanlab_project: p, use_tensorboard: false}
  => trackers: [{name: jsonl}, {name: swanlab, mode: offline, project: p}]
older: true, algorithm: {kl_ctrl.type: adaptive, kl_ctrl.target_kl: 0.2, kl_ctrl.horizon: 500, kl_ctrl.kl_coef: 0.1}
  => algorithm.kl_target: 0.2, algorithm.kl_horizon: 500
generate_config: {infer_tensor_parallel_size: 4, infer_expert_parallel_size: 4}
  => services.rollout.parallel: {tensor: 4, expert: 4}
generate_config: {infer_tensor_parallel_size: 2, infer_expert_parallel_size: 4, infer_pipeline_parallel_size: 2}
  => services.rollout.parallel: {tensor: 2, pipeline: 2, data: 2, expert: 4}
rl_config: {partial_rollout_max_split: 4} => training.partial_rollouts: true, training.staleness: 3
megatron_training: {stage: ray_ppo}, actor_config: {load: a, tensor_model_parallel_size: 2},
  critic_config: {lr: 5e-6, load: a, tensor_model_parallel_size: 4, sequence_parallel: true, adam_beta2: 0.9},
  rl_config: {adv_estimator: gae, lam: 0.9, cliprange_value: 0.3, critic_resource.num_npus: 4},
  generate_config: {offload_train_optimizer: true, offload_train_param: true}
  => critic.path: null, critic.value_clip: 0.3, critic.learning_rate: 5e-6,
  algorithm.gae_lambda: 0.9, services.critic.parallel: {tensor: 4, sequence: true}, services.critic.colocate: trainer,
  services.critic.processes: 4, services.critic.offload: [optimizer], services.trainer.offload: [optimizer, param],
  services.trainer.parallel.tensor: 2
megatron_training: {stage: ray_dapo}, rl_config: {clip_higher_enable: true, clip_ratio_low: 0.1, clip_ratio_high: 0.3,
  filter_groups_enable: true, filter_groups_max_batches: 7, filter_groups_train_batch_size: 16, mini_batch_size: 16,
  token_level_loss: false, overlong_buffer_enable: true, overlong_buffer: 128, overlong_buffer_penalty_factor: 0.5,
  rollout_max_tokens: 512}
  => algorithm: {dynamic_sampling: true, dynamic_sampling_limit: 7, overlong_buffer: 0.25, overlong_penalty: 0.5,
  aggregation: seq_mean_token_mean, clip_low: 0.1, clip_high: 0.3},
  training.groups_per_step: 16, training.mini_batch_size: null
rl_config: {clip_higher_enable: true, clip_ratio: 0.25, clip_ratio_low: 0.1, clip_ratio_high: 0.3,
  filter_groups_enable: true, filter_groups_max_batches: 7, filter_groups_train_batch_size: 16}
  => algorithm.clip_low: 0.25, algorithm.clip_high: 0.25, algorithm.dynamic_sampling: null,
  algorithm.dynamic_sampling_limit: null, training.groups_per_step: 32
megatron_training: {stage: ray_ppo}, critic_config: {lr: 1e-5}, rl_config: {kl_ctrl_type: adaptive, kl_target: 0.2,
  kl_horizon: 500, init_kl_coef: 0.02, adv_estimator: gae, use_kl_in_reward: true}
  => algorithm.kl_coefficient: 0.02, algorithm.kl_target: null, algorithm.kl_horizon: null
model: {adam_beta1: 0.7, adam_beta2: 0.8, weight_decay: 0.3}, actor_config: {weight_decay: 0.1},
  megatron_training: {adam_beta2: 0.85, weight_decay: 0.2}
  => training.optimizer.betas: [0.7, 0.85], training.optimizer.weight_decay: 0.1
"""


@pytest.mark.parametrize(("theirs", "ours"), cases(TRANSLATED))
def test_what_is_made_of_a_key(theirs: dict[str, Any], ours: str) -> None:
    got = made(**theirs)
    wanted = configured(ours)
    assert {path: at(got, path) for path in wanted} == wanted


REFUSED = """
megatron_training: {dpo_loss_type: hinge} => DPO
megatron_training: {vocab_extra_ids: 2} => tokenizer.json
megatron_training: {cp_attention_mask_type: full} => causal
msprobe_config: {msprobe: true} => mismatch
"""
IMPOSSIBLE = """
actor_config: {pipeline_model_parallel_size: 4, num_layer_list: '9,8,9,10'} => the same number of layers
actor_config: {pipeline_model_parallel_size: 4, num_layer_list: '9,8'} => has 2 stages
generate_config: {sampling_config.top_k: 20} => training samples from the whole distribution
generate_config: {infer_tensor_parallel_size: 2, infer_expert_parallel_size: 3} => must be a multiple
rl_config: {overlong_buffer_enable: true, overlong_buffer: 128, rollout_max_tokens: 2048}
  => rl_config.rollout_max_tokens: 2048: is not how long a reply may be, 512
rl_config: {overlong_buffer_enable: true, overlong_buffer: 512, rollout_max_tokens: 512} => must be below the 512 tokens
"""


@pytest.mark.parametrize(("changes", "said"), cases(REFUSED + IMPOSSIBLE))
def test_what_sluice_does_not_do_and_what_cannot_be_is_refused(changes: dict[str, Any], said: str) -> None:
    assert said in refused(**changes)[0]
    if said in REFUSED:
        ((section, keys),) = changes.items()
        (name,) = keys
        made(**{section: {name: TABLE.find(section, name)[1].default}})  # type: ignore[index]
        made(**changes, without=(name,))


def test_the_report_says_which_key_decided_and_what_was_carried_over() -> None:
    got = made(model={"weight_decay": 0.3}, megatron_training={"weight_decay": 0.2}, actor_config={"weight_decay": 0.1})
    assert row(got, "megatron_training.weight_decay").reason == "actor_config.weight_decay stands over it"
    assert row(got, "model.m.weight_decay").outcome == "ignored"
    carried = {each.path: each.ours for each in made().carried}
    assert carried["rl_config.init_kl_coef"] == ("algorithm.kl_coefficient=0.01",)
    assert not {"rl_config.gamma", "megatron_training.adam_beta1"} & carried.keys()  # these are ours too
    keys = {"sampling_config.top_p": 1, "sampling_config.top_k": 0, "sampling_config.min_p": 0, "torchair_graph": False}
    off = made(generate_config=keys, rl_config={"multi_turn_enable": False, "partial_rollout_max_split": 1}).rows
    assert len([each for each in off if each.reason.startswith("off there too")]) == 6
    critic = {"lr": 1e-5, "lr_decay_style": "constant", "weight_decay": 0}
    ours = made(critic_config=critic, rl_config={"adv_estimator": "gae", "cliprange_value": 0.2})
    assert ours.raw["critic"] == {}, "a critic whose settings are ours is there all the same"
    adaptive = {"kl_ctrl_type": "adaptive", "kl_target": 0.2, "kl_horizon": 500}
    assert "it stays init_kl_coef" in row(made(rl_config=adaptive), "rl_config.kl_target").reason
    left = made(("init_kl_coef", "rl_config.clip-ratio"), rl_config={"init_kl_coef": 0.5, "clip_ratio": 0.4})
    assert "algorithm" not in left.raw and row(left, "rl_config.init_kl_coef").ours == ()
    assert row(left, "rl_config.clip_ratio").outcome == "left out"


ADVISED = """
model: {} => sampling_config.top_k is 50: as the file has none
generate_config: {sampling_config.top_k: -1} => sampling_config.top_k is 50
rl_config: {actor_resource.num_npus: 32}, megatron_training: {no_shared_storage: true}
  => services.coordinator.host and port: SLUICE_SECRET
rl_config: {actor_resource.num_npus: 16} => services.coordinator.host and port
"""


@pytest.mark.parametrize(("changes", "said"), cases(ADVISED))
def test_what_is_advised(changes: dict[str, Any], said: str) -> None:
    """What the advice is about, and a part of it; nothing where there is none."""
    about, _, part = said.partition(": ")
    advised = [line for line in made(**changes).advice if about in line]
    assert len(advised) == bool(part) and all(part in line for line in advised)


# Names and defaults of its configuration classes, of April 2026; "?" is a default that follows from another.
DECLARED: dict[str, dict[str, Any]] = json.loads((FILES / "declared.json").read_text(encoding="utf-8"))
OURS = set(paths(inspect.type_info(Config)))


def declared(section: str) -> list[tuple[str, Any]]:
    """Keys of a section, those within mappings with dots, and their defaults."""
    return [
        (f"{name}.{inner}" if inner else name, value)
        for name, default in DECLARED[section].items()
        for inner, value in (default.items() if isinstance(default, dict) else [("", default)])
    ]


def test_every_key_that_it_declares_is_there_with_its_default() -> None:
    for section in DECLARED:
        keys = TABLE.sections[section]
        for name, default in declared(section):
            assert name in keys or any(other.startswith(f"{name}.") for other in keys), name
            key = keys.get(name)
            if key is not None and default != "?" and (key.to or key.refused):
                assert key.default == default, name
                assert isinstance(key.default, bool) is isinstance(default, bool), name
    assert dict(declared("generate_config"))["sampling_config.top_k"] == 50, "of keys within mappings too"
    assert {"stage", "is_pairwise_dataset", "mm_model", "skip_train"} <= TABLE.essential
    assert not {"top_p", "top_k", "multi_turn_enable", "adv_estimator", "use_integrated_worker"} & TABLE.essential


def test_a_key_has_one_outcome_and_a_reason() -> None:
    for section, keys in TABLE.sections.items():
        for name, key in keys.items():
            told = f"{section}.{name}"
            assert [bool(key.to), bool(key.ignored), bool(key.refused)].count(True) == 1, told
            assert set(key.to) <= OURS and "-" not in name, told
            if key.to:
                assert key.type or key.default is not None, f"{told}: its type has to be known"
                assert key.fault(b"x") != "" and key.fault(key.default) == "", told
            if key.refused:
                assert key.asks_for_nothing(key.default) and not key.asks_for_nothing("something else"), told


def test_the_guide_has_the_options_and_configurations_of_the_schema() -> None:
    page = GUIDE.read_text(encoding="utf-8")
    blocks = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert blocks
    for block in blocks:
        assert loading.type_faults(yaml.safe_load(block)) == []
    (shown,) = (yaml.safe_load(block) for block in blocks if "gsm8k" in block)
    preset = yaml.safe_load((ROOT / "configs" / "gsm8k_qwen25_1_5b.yaml").read_text(encoding="utf-8"))
    assert shown["rewards"]["rules"] == preset["rewards"]["rules"]
    assert shown["data"]["prompt_type"] == preset["data"]["prompt_type"]
    table_of_options = page.partition("| option |")[2].partition("\n\n")[0]
    parser = CommandParser()
    options.add_import(parser, *options.IMPORTS["mindspeed"][1:])
    for action in parser._actions:
        name = action.option_strings[-1] if action.option_strings else action.dest.upper()
        assert f"`{name}" in table_of_options or name == "--help", name
    assert (ROOT / "configs" / "envs" / f"{ASCEND}.yaml").is_file()
