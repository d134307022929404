"""`sluice import-mindspeed` on whole files: what is written, what is said of each key, and what is refused.

`mindspeed/*.yaml` are files in MindSpeed-RL's formats with its published settings; `mindspeed/expected` has what is made of
them. To renew these after a change: remove them, and import each file again with --output and --report.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher import cli
from launcher.node.local_node import LocalNode
from runtime.config import Config, model_checks
from runtime.config.loading import load
from runtime.models.tiny_model import write_tokenizer
from tests.unit.model_dimensions import CONFIGS

FILES = Path(__file__).parent / "mindspeed"
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


def model_folder(path: Path, name: str) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIGS[name]))
    write_tokenizer(path)
    (path / "model.safetensors").touch()
    return path


@pytest.mark.parametrize("name", MODELS)
def test_the_file_and_the_report_are_those_expected(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, report = tmp_path / "ours.yaml", tmp_path / "report.md"
    assert run("import-mindspeed", FILES / f"{name}.yaml", "--output", output, "--report", report) == 0
    assert output.read_text(encoding="utf-8") == (EXPECTED / f"{name}.yaml").read_text(encoding="utf-8")
    assert report.read_text(encoding="utf-8") == (EXPECTED / f"{name}.md").read_text(encoding="utf-8")
    told = capsys.readouterr().out
    assert f"next: sluice validate {output}" in told
    assert re.search(r"^\d+ keys: \d+ mapped, \d+ ignored, 0 refused, 0 left out$", told, re.MULTILINE)


@pytest.mark.parametrize("name", MODELS)
def test_the_report_has_every_key_of_the_file_with_a_reason(name: str) -> None:
    """Counted in the files by the indentation of their lines."""
    text = (FILES / f"{name}.yaml").read_text(encoding="utf-8")
    keys = re.findall(r"^ +([\w-]+): *\S", text[text.index("\n\n") :], re.MULTILINE)
    rows = re.findall(
        r"^\| (\S+) \| .* \| (\w+) \| (.*) \|$", (EXPECTED / f"{name}.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    table = [(path, outcome, reason) for path, outcome, reason in rows if outcome in ("mapped", "ignored")]
    own = [path for path, _, _ in table if not path.startswith("model.")]
    assert [path.rpartition(".")[2] for path in own] == [key.replace("-", "_") for key in keys]
    assert [path for path, _, reason in table if not reason or "decides nothing here" in reason] == []


@pytest.mark.parametrize("name", MODELS)
def test_what_is_made_is_valid(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a model's description in the place of its folder, problems in that of the prepared data, and devices."""
    monkeypatch.setattr(model_checks, "_installed", lambda: True)
    monkeypatch.setattr(LocalNode, "memory", lambda self, config: None)
    model = model_folder(tmp_path / "model", MODELS[name])
    (tmp_path / "train.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    overrides = {
        "model.path": model,
        "model.reference": model,
        "data.train": tmp_path / "train.jsonl",
        "services.rollout.python": sys.executable,
        "trackers": "[{name: jsonl}]",  # the package of the other need not be installed
    }
    if name.startswith("ppo"):
        overrides["critic.path"] = model
    assert run("validate", EXPECTED / f"{name}.yaml", *(f"{key}={value}" for key, value in overrides.items())) == 0


def test_r1_zero_is_the_configuration_that_comes_with_sluice() -> None:
    ours = load(EXPECTED / "r1_zero_qwen25_7b.yaml")
    shipped = load(Path(__file__).parents[2] / "configs" / "r1_zero_qwen25_7b.yaml")
    assert sorted(ours.rewards.rules, key=lambda rule: rule.name) == sorted(shipped.rewards.rules, key=lambda rule: rule.name)
    for section, keys in {
        "sampling": ("group_size", "max_new_tokens", "temperature"),
        "data": ("prompt_type", "max_prompt_tokens"),
        "algorithm": ("advantage", "kl", "kl_coefficient", "kl_placement"),
        "training": ("groups_per_step", "mini_batch_size"),
    }.items():
        for key in keys:
            assert getattr(getattr(ours, section), key) == getattr(getattr(shipped, section), key), key
    services = ours.services
    assert (services.trainer.processes, services.reference.processes) == (8, 2)
    assert not isinstance(services.rollout, list)
    assert services.rollout.replicas * services.rollout.tensor_parallel == 6
    assert ours.training.max_tokens_per_microbatch == 2 * 4096  # not max_tokens_to_oom, without use_dynamic_bsz


@pytest.mark.parametrize("name", ["grpo_qwen25_7b", "r1_zero_qwen25_7b"])
def test_dashes_and_underscores_are_alike(name: str, folder: Path, tmp_path: Path) -> None:
    file = folder / f"{name}.yaml"
    text = re.sub(
        r"^( *)([a-z][\w]*):", lambda match: match[1] + match[2].replace("_", "-") + ":", file.read_text(), flags=re.M
    )
    assert "seq-length:" in text
    file.write_text(text)
    assert imported(file, tmp_path) == load(EXPECTED / f"{name}.yaml")


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


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("is_pairwise_dataset: true", "model.qwen25_7b.is_pairwise_dataset"),
        ("mm_model: qwen2vl", "model.qwen25_7b.mm_model"),
        ("skip_train: true", "model.qwen25_7b.skip_train"),
    ],
)
def test_what_says_what_is_trained_cannot_be_left_out(
    change: str, key: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed(folder / "model" / "qwen25_7b.yaml", ("qwen25_7b:\n", f"qwen25_7b:\n  {change}\n"))
    file = changed(folder / "grpo_qwen25_7b.yaml", ("top_p: 1.0", "top_p: 0.9"))
    output, name = tmp_path / "ours.yaml", key.rpartition(".")[2]
    assert run("import-mindspeed", file, "--output", output) == 2
    lines = capsys.readouterr().err.splitlines()
    assert any(line.startswith(f"error: {key}: ") and ": refused: " in line for line in lines)
    assert lines[-1] == "error: --without top_p leaves out what may be left out"
    assert run("import-mindspeed", file, "--output", output, "--without", f"{name},top_p") == 2
    assert capsys.readouterr().err.splitlines() == [
        f"error: --without {name}: {key} says what is trained, and cannot be left out"
    ]
    assert not output.exists()


def test_the_stage_cannot_be_left_out(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = changed(folder / "grpo_qwen25_7b.yaml", ("stage: ray_grpo", "stage: ray_dpo"))
    options = ["--output", tmp_path / "ours.yaml"]
    assert run("import-mindspeed", file, *options) == 2
    assert "--without" not in capsys.readouterr().err
    assert run("import-mindspeed", file, *options, "--without", "stage") == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: --without stage: megatron_training.stage says what is trained, and cannot be left out"
    ]


@pytest.mark.parametrize("name", ["grpo_qwen25_7b", "ppo_qwen25_32b"])
def test_left_out_the_devices_are_shared_as_by_default_there(name: str, folder: Path, tmp_path: Path) -> None:
    file = changed(folder / f"{name}.yaml", ("use_integrated_worker: true", "use_integrated_worker: false"))
    assert imported(file, tmp_path, "--without", "use_integrated_worker") == load(EXPECTED / f"{name}.yaml")


BAD: list[tuple[list[tuple[str, str]], list[str]]] = [
    ([("gamma: 1.0", "gama: 1.0")], ["rl_config.gama: unknown key; nearest is gamma"]),
    (
        [("  min_lr: 0\n", "  temperature: 0.7\n")],
        ["actor_config.temperature: unknown key; actor_rollout_ref.actor_rollout has"],
    ),
    ([("rl_config:", "rl_confg:")], ["rl_confg: unknown section; nearest is rl_config"]),
    ([("train_iters: 500", "train_iters: many")], ["megatron_training.train_iters: many is not a whole number"]),
    ([("use_integrated_worker: true", "use_integrated_worker: 1")], ["use_integrated_worker: 1 is not true or false"]),
    ([("lr: 1e-6", "lr: [1]")], ["actor_config.lr: [1] is not a number"]),
    (
        [("    num_npus: 16", "    npus: 16")],
        ["rl_config.actor_resource.npus: unknown key; nearest is actor_resource.num_npus"],
    ),
    ([("actor_resource:\n    num_npus: 16", "actor_resource: 16")], ["rl_config.actor_resource: 16 is not a mapping"]),
    (
        [("mini_batch_size: 32", "mini_batch_size: 12")],
        ["rl_config.mini_batch_size: 12: does not divide the 32 prompts of a step"],
    ),
    ([("num_npus: 16", "num_npus: 18")], ["rl_config.actor_resource.num_npus: 18: is not a multiple of tensor 2 x pipeline 2"]),
    ([("num_npus: 16", "num_npus: 12")], ["num_npus: 12: makes 3 data-parallel blocks, among which the 32 prompts"]),
    (
        [("tensor_model_parallel_size: 2", "tensor_model_parallel_size: 0")],
        ["tensor_model_parallel_size: 0: must be at least 1"],
    ),
    ([("infer_tensor_parallel_size: 2", "infer_tensor_parallel_size: 3")], ["infer_tensor_parallel_size: 3: does not divide"]),
    ([("seq_length: 4096", "seq_length: 2048")], ["megatron_training.seq_length: 2048: leaves no room for a reply behind"]),
    ([("[1.0, 0.2]", "[1.0]")], ["rl_config.verifier_weight: has 1 weights for the 2 of verifier_function"]),
    ([("math_17k_acc", "math_17_acc")], ["math_17_acc is no verifier; nearest is math_17k_acc. MindSpeed-RL passes over it"]),
    ([("kl_penalty: low_var_kl", "kl_penalty: full")], ["rl_config.kl_penalty: full: refused: must be one of kl, abs, mse,"]),
    ([("adv_estimator: group_norm", "adv_estimator: rloo")], ["adv_estimator: rloo: refused: must be group_norm or gae"]),
    ([("lr_decay_style: constant", "lr_decay_style: inverse-square-root")], ["lr_decay_style: inverse-square-root: refused:"]),
    ([("stage: ray_grpo", "stage: ray_online_dpo")], ["megatron_training.stage: ray_online_dpo: refused:"]),
    (
        [("init_kl_coef: 0.001", "init_kl_coef: -1.0")],
        ["rl_config.init_kl_coef: algorithm.kl_coefficient: -1.0 is not a finite"],
    ),
    (
        [("model: qwen25_7b\n  stage", "model: qwen3_8b\n  stage")],
        ["megatron_training.model: qwen3_8b is no model of `defaults`"],
    ),
    (
        [("      - qwen25_7b", "      - qwen9")],
        ["defaults: model qwen9: there is no "],
    ),
    (
        [("  - model:\n      - qwen25_7b", "  - trainer: x")],
        ["defaults: {trainer: x}: only"],
    ),
    ([("./Qwen2.5-7B", "${oc.env:HOME}/Qwen")], ["tokenizer_name_or_path: ${oc.env:HOME}/Qwen: is not resolved here"]),
    (
        [("seed: 1", "seed: 1\n  max_tokens_to_oom: 1\n  max-tokens-to-oom: 2")],
        ["max_tokens_to_oom: occurs twice, with dashes"],
    ),
    ([("seed: 1", "seed: 1\n  seed: 2")], ["key 'seed' occurs twice"]),
    ([("rl_config:", "algorithm: {}\nrl_config:")], ["has sections of both formats, megatron_training and algorithm"]),
    (
        [("gamma: 1.0", "gama: 1.0"), ("min_p: 0.0", "min_p: 0.1"), ("epochs: 1", "epochs: some")],
        [
            "rl_config.gama: unknown key",
            "rl_config.epochs: some is not",
            "sampling_config.min_p: 0.1: refused: ",
            "--without min_p",
        ],
    ),
]


@pytest.mark.parametrize(("changes", "parts"), BAD, ids=[parts[0][:60] for _, parts in BAD])
def test_a_mistake_is_a_line_each_and_nothing_is_written(
    changes: list[tuple[str, str]], parts: list[str], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = changed(folder / "grpo_qwen25_7b.yaml", *changes)
    output, report = tmp_path / "ours.yaml", tmp_path / "report.md"
    assert run("import-mindspeed", file, "--output", output, "--report", report) == 2
    told = capsys.readouterr()
    lines = told.err.splitlines()
    refused = sum(": refused: " in line for line in lines)
    hinted = refused and "--without" not in parts[-1] and ".stage: " not in parts[0]
    assert len(lines) == len(parts) + (1 if hinted else 0), told.err
    assert all(line.startswith("error: ") for line in lines)
    for part in parts:
        assert any(part in line for line in lines), (part, told.err)
    assert told.out == ""
    assert not output.exists()
    assert not report.exists()


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        (
            [("[6, 8]", "[6, 6]")],
            "resource_pool.actor_rollout: 12 devices, but num_gpus_for_train 8 + num_gpus_for_infer 6 are 14",
        ),
        ([("[6, 8]", "[6, some]")], "resource_pool.actor_rollout: [6, 'some']: is not a list of numbers of devices"),
        (
            [("num_gpus_for_infer: 6", "num_gpus_for_infer: 7"), ("[6, 8]", "[7, 8]")],
            "num_gpus_for_infer: 7: is not a multiple of",
        ),
        (
            [("verifier: true", "verifier: false"), ("reward: []", "reward: [2]"), ("  load: ./ckpt/orm\n", "")],
            "which no section",
        ),
        (
            [("do_sample: true", "do_sample: false")],
            "actor_rollout_ref.actor_rollout.do_sample: false: refused: replies are always",
        ),
        ([("  ref:\n", "  rev:\n")], "actor_rollout_ref.rev: unknown section; allowed are actor_rollout, ref"),
        ([("./dataset/pe-nlp/data", "1,./a,./b")], "data_path: 1,./a,./b: is not WEIGHT,PREFIX,WEIGHT,PREFIX,..."),
    ],
)
def test_mistakes_of_the_older_format(
    changes: list[tuple[str, str]], part: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = changed(folder / "r1_zero_qwen25_7b.yaml", *changes)
    assert run("import-mindspeed", file, "--output", tmp_path / "ours.yaml") == 2
    assert part in capsys.readouterr().err
    assert not (tmp_path / "ours.yaml").exists()


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
        told = capsys.readouterr().err
        assert part in told, told
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


def test_a_missing_model_is_one_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "grpo.yaml"
    file.write_text("defaults: [{model: no}]\nmegatron_training: {train_iters: 1}\nactor_config: {model: no}\nrl_config: {}\n")
    assert run("import-mindspeed", file, "--output", tmp_path / "out.yaml") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "defaults: model no: there is no" in line
