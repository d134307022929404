"""`sluice import-verl`: a script and files of verl's, what is written of them, and what is refused. `verl/` has whole ones."""

from __future__ import annotations

import json
import pprint
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec import inspect, to_builtins

from launcher import cli
from launcher.commands import options
from launcher.node.local_node import LocalNode
from launcher.verl.script import UNKNOWN, Script
from launcher.verl.translate import TABLE
from runtime.config import Config
from runtime.config.loading import load
from runtime.models.tiny_model import write_tokenizer
from runtime.process.os_process import CommandParser
from tests.unit.config_cases import cases, configured, paths, without_name
from tests.unit.model_dimensions import CONFIGS

FILES = Path(__file__).parent / "verl"
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "migration.md"
CALL = "python3 -m verl.trainer.main_ppo data.train_files=t.jsonl actor_rollout_ref.model.path=/m"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DEVICE", "LONG", "MODEL_PATH", "NAME"):
        monkeypatch.delenv(name, raising=False)


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as end:
        cli.main([str(argument) for argument in arguments])
    assert isinstance(end.value.code, int)
    return end.value.code


def imported(file: Path, *more: object) -> Config:
    output = file.parent / "ours.yaml"
    output.unlink(missing_ok=True)
    assert run("import-verl", file, "--output", output, *more) == 0
    return load(output)


def script(folder: Path, *overrides: str, call: str = CALL) -> Path:
    (folder / "run.sh").write_text(" \\\n  ".join([call, *overrides]) + "\n")
    return folder / "run.sh"


def refused(file: Path, capsys: pytest.CaptureFixture[str], *more: object) -> str:
    assert run("import-verl", file, "--output", file.parent / "none.yaml", *more) == 2
    assert not (file.parent / "none.yaml").exists()
    return capsys.readouterr().err


def words(text: str, environment: Mapping[str, str] | None = None) -> list[str]:
    (call,) = Script(text, environment or {}).calls
    return call[1:]


def differing(ours: Config, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The wanted values by dotted path that the configuration does not have, with those that it has."""
    found: dict[str, Any] = {}
    for path, value in wanted.items():
        node: Any = to_builtins(ours)
        for part in path.split("."):
            node = node[int(part) if isinstance(node, list) else part]
        if node != value:
            found[path] = node
    return found


@pytest.mark.parametrize("name", ["dapo.sh", "ppo.yaml"])
def test_a_whole_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is what was read and kept in verl/expected, and valid where the files are that it names; every row of the report says
    what or why."""
    monkeypatch.setattr(LocalNode, "memory", lambda self, config: None)
    monkeypatch.chdir(tmp_path)
    shutil.copy(FILES / name, tmp_path / name)
    assert run("import-verl", name, "--output", "ours.yaml", "--report", "report.md") == 0
    assert (tmp_path / "ours.yaml").read_text() == (FILES / "expected" / name).with_suffix(".yaml").read_text()
    rows = re.findall(
        r"^\| (\S+\.\S+) \| .* \| (?:mapped|ignored|to decide) \| (.*) \|$", (tmp_path / "report.md").read_text(), re.M
    )
    assert len(rows) > 15
    assert [path for path, reason in rows if not reason or "decides nothing here" in reason] == []
    for folder in ("models/tiny", "data/aime"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "models/tiny/config.json").write_text(json.dumps(CONFIGS["qwen25_7b"]))
    write_tokenizer(tmp_path / "models/tiny")
    (tmp_path / "models/tiny/model.safetensors").touch()
    for file in ("train", "aime/2024", "aime/2025"):
        given = {"prompt": [{"role": "user", "content": file}], "reward_model": {"ground_truth": "2"}}
        (tmp_path / f"data/{file}.jsonl").write_text(json.dumps(given) + "\n")
    overrides = [f"services.rollout.python={sys.executable}", "data.eval=", "evaluation.before=false"]
    assert run("validate", tmp_path / "ours.yaml", *(overrides if name.endswith("sh") else overrides[1:])) == 0


def test_the_environment_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(FILES / "dapo.sh", tmp_path / "dapo.sh")
    monkeypatch.setenv("DEVICE", "ascend")
    monkeypatch.setenv("LONG", "1")
    monkeypatch.setenv("MODEL_PATH", "/elsewhere")
    ours = imported(tmp_path / "dapo.sh")
    assert (ours.services.platform, ours.training.steps, ours.model.path) == ("ascend", 2000, "/elsewhere")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "ours.yaml").unlink()
    assert run("import-verl", script(tmp_path, "data.train_files=~/a.parquet"), "--output", tmp_path / "ours.yaml") == 0
    text = (tmp_path / "ours.yaml").read_text()  # with verl's own default too
    assert f"train: {tmp_path}/a.parquet, eval: {tmp_path}/data/rlhf/gsm8k/test.parquet" in text


def test_what_verl_prints_is_read_alike(tmp_path: Path) -> None:
    shutil.copy(FILES / "ppo.yaml", tmp_path / "ppo.yaml")
    raw: dict[str, Any] = yaml.safe_load((FILES / "ppo.yaml").read_text())
    del raw["defaults"], raw["hydra"]
    raw["actor_rollout_ref"]["rollout"]["max_model_len"] = None
    printed = "".join(f"(TaskRunner pid=31) {line}\n" for line in pprint.pformat(raw).splitlines())
    (tmp_path / "ppo.log").write_text(printed)
    assert imported(tmp_path / "ppo.log") == imported(tmp_path / "ppo.yaml")


MADE = """
custom_reward_function.path: my_reward.py => data.additional_keys: [data_source, extra_info]
reward.custom_reward_function.path: my_reward.py => data.additional_keys: [data_source, extra_info]
custom_reward_function.path: 'null' => data.additional_keys: []
reward_model.enable: 'True', reward_model.model.path: /scorer => rewards.model.path: /scorer, rewards.rules.0.weight: 0.0
actor_rollout_ref.actor.policy_loss.loss_mode: geo_mean, actor_rollout_ref.actor.clip_ratio: 0.4
  => algorithm.loss: gmpo, algorithm.aggregation: seq_mean_token_mean, algorithm.dual_clip: 0.0,
  algorithm.clip_low: 0.4, algorithm.clip_high: 0.4
actor_rollout_ref.model.lora_rank: 32, actor_rollout_ref.model.target_modules: '[q_proj,v_proj]'
  => lora.rank: 32, lora.alpha: 16.0, lora.target_modules: [q_proj, v_proj]
actor_rollout_ref.rollout.tensor_model_parallel_size: 2, actor_rollout_ref.rollout.data_parallel_size: 2,
  actor_rollout_ref.rollout.expert_parallel_size: 4, actor_rollout_ref.rollout.pipeline_model_parallel_size: 2
  => services.rollout.parallel.tensor: 2, services.rollout.parallel.pipeline: 2, services.rollout.parallel.data: 2,
  services.rollout.parallel.expert: 4, services.rollout.replicas: 1
model_engine: megatron, actor_rollout_ref.actor.megatron.tensor_model_parallel_size: 2,
  actor_rollout_ref.actor.megatron.optimizer_offload: 'True', actor_rollout_ref.actor.use_kl_loss: 'true',
  +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity: full
  => services.trainer.engine: megatron, services.trainer.parallel.tensor: 2, services.trainer.parallel.sequence: true,
  services.trainer.offload: [optimizer], services.trainer.activation_checkpointing: true,
  services.reference.engine: megatron, services.reference.parallel.tensor: 2, services.critic.engine: megatron
trainer: trainer.main_ppo => training.staleness: 0, training.partial_rollouts: false, algorithm.loss: ppo
trainer: experimental.one_step_off_policy.main_ppo, rollout.nnodes: 1
  => training.staleness: 1, training.partial_rollouts: false, algorithm.loss: ppo
trainer.v1.trainer_mode: colocate_async => training.staleness: 1, training.partial_rollouts: true, algorithm.loss: ppo
trainer.v1.trainer_mode: separate_async, actor_rollout_ref.rollout.nnodes: 1
  => training.staleness: 8, training.partial_rollouts: false, algorithm.loss: ppo
trainer: experimental.fully_async_policy.fully_async_main, async_training.staleness_threshold: 0
  => training.staleness: 0, training.partial_rollouts: false, algorithm.loss: ppo
trainer: experimental.fully_async_policy.fully_async_main, data.train_batch_size: 0, trainer.n_gpus_per_node: 4,
  actor_rollout_ref.actor.ppo_mini_batch_size: 32, async_training.staleness_threshold: 1.5,
  async_training.require_batches: 2, rollout.n_gpus_per_node: 4, rollout.total_rollout_steps: 2560,
  algorithm.adv_estimator: grpo, rollout.nnodes: 1
  => training.staleness: 2, training.lr_staleness_power: 0.0, training.groups_per_step: 256, training.mini_batch_size: 32,
  training.steps: 10, services.trainer.processes: 4, services.rollout.replicas: 2, services.rollout.colocate: ''
"""


@pytest.mark.parametrize(("theirs", "ours"), cases(MADE))
def test_what_is_made_of_overrides(theirs: dict[str, Any], ours: str, tmp_path: Path) -> None:
    call = CALL.replace("trainer.main_ppo", theirs.pop("trainer", "trainer.main_ppo"))
    file = script(tmp_path, *(f"{key}={value}" for key, value in theirs.items()), call=call)
    assert differing(imported(file), configured(ours)) == {}


REFUSED = """
algorithm.adv_estimator=remax => algorithm.adv_estimator: remax: refused: must be one of gae, grpo,
actor_rollout_ref.rollout.top_p=0.9 => actor_rollout_ref.rollout.top_p: 0.9: refused: rollouts on vLLM
actor_rollout_ref.rollout.multi_turn.enable=True => multi_turn.enable: true: refused: episodes of several turns
actor_rollout_ref.actor.clip_ratio_hi=0.3 => clip_ratio_hi: unknown key; nearest is clip_ratio_high
data.max_prompt_length=long => data.max_prompt_length: long is not a whole number
data.train_batch_size=100 => ppo_mini_batch_size: 256: does not divide the 100 prompts of a step
trainer.experiment_name=$NAME => experiment_name: $NAME: $NAME is not known here; set its variable in the environment
trainer.nnodes=$(ray_nodes) => trainer.nnodes: $(ray_nodes): $(ray_nodes) is not known here
trainer.n_gpus_per_node=7 => refused: 7 devices in blocks of 1 cannot share out the 256 prompts of an update
"""


@pytest.mark.parametrize("case", REFUSED.strip().splitlines())
def test_what_is_refused_is_a_line(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    override, _, line = case.partition(" => ")
    file = script(tmp_path, override)
    assert line in refused(file, capsys)
    if "train_batch_size" not in override:
        imported(file, "--without", override.partition("=")[0])
        assert "left out by --without" in (tmp_path / "ours.yaml").read_text().lower()


def test_what_cannot_be_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot be left out" in refused(script(tmp_path), capsys, "--without", "actor_rollout_ref.model.path")


NOT_VERL = {
    ("run.sh", "python3 train.py a=b\n"): "has no call of verl's trainer",
    ("run.sh", f"{CALL}\n{CALL}\n"): "has 2 calls of verl's trainer",
    ("run.sh", f'{CALL} "trainer.nnodes=1\n'): 'a " is missing',
    ("run.sh", f"fi\n{CALL}\n"): "a fi has nothing to end",
    ("run.sh", f"{CALL} trainer.nnodes\n"): "trainer.nnodes: is not KEY=VALUE",
    ("a.yaml", "run: {name: a}\ndata: {train: a.jsonl}\n"): "no script that calls its trainer; sluice validate reads",
    ("a.yaml", "rl_config: {}\n"): "sluice import-mindspeed reads it",
    ("a.yaml", "text\n"): "not a mapping of keys",
    ("a.log", "{'data': {'seed': 1}"): "does not end so",
}


@pytest.mark.parametrize(("name", "text"), NOT_VERL)
def test_what_is_not_verls(name: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / name).write_text(text)
    assert NOT_VERL[name, text] in refused(tmp_path / name, capsys)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('A=1\npython -m verl.trainer.main_ppo a=$A b="${A}2" c=\'$A\' d="it\'s"', ["a=1", "b=12", "c=$A", "d=it's"]),
        ("X=(a=1 'b=2 3')\nX+=(c=3) # c=4\nm() {\n X=()\n}\nuv run main_ppo.py \"${X[@]}\"", ["a=1", "b=2 3", "c=3"]),
        ("N=2\nN=$((N * (3 + 4) / 5 - 1))\npython -m verl.trainer.main_ppo n=$N # n=1\n", ["n=1"]),
        (
            'A=${A:-"${B:-x y}"}; E="a=1 b=2"\nA=$A python -m verl.trainer.main_ppo "a=$A" $E > log 2>&1 &',
            ["a=x y", "a=1", "b=2"],
        ),
        (
            'A=1\nif [ -z "$B" ] || { [ $A = 2 ] && false; }; then\n A=3\nelif [ 1 = 1 ]; then A=4; fi\nmain_ppo.py a=$A',
            ["a=3"],
        ),
        ("A=1\n[ $A != 1 ] && A=2\n[ $A = 2 ] || A=${A}3\nmain_ppo.py a=$A", ["a=13"]),
        ('case x in\n a|b) A=1 ;;\n x|c) A=2 ;; *) A=3 ;; esac\nmain_ppo.py a=$A "$@"', ["a=2"]),
        ("cat <<EOF > env\nA: 'x\nEOF\nmain_ppo.py a=\\$b \\\n  c", ["a=$b", "c"]),
    ],
)
def test_scripts(text: str, expected: list[str]) -> None:
    assert words(text, {"B": ""}) == expected


def test_what_may_be_set_is_unknown() -> None:
    found = words(
        "A=1\nif probe; then A=2; C=3; fi\nfor B in 1 2; do D=5; done\nmain_ppo.py a=$A b=$C c=$D d=$(pwd) e=$(date)",
        {"PWD": "/w"},
    )
    assert [UNKNOWN in each for each in found] == [True, True, True, False, False]
    assert found[3:] == ["d=/w", "e="]
    assert "set behind `if probe`" in found[0]


def test_a_key_of_the_table_has_one_outcome_and_decides_what_there_is() -> None:
    ours = set(paths(inspect.type_info(Config)))
    for section, keys in TABLE.sections.items():
        for name, key in keys.items():
            told = f"{section}.{name}"
            assert [bool(key.to), bool(key.decide), bool(key.ignored), bool(key.refused)].count(True) == 1, told
            assert set(map(without_name, key.to)) <= ours, told
            assert not (key.to and not key.type and key.default is None), told
            assert not key.when or key.otherwise, told
            assert not key.when or key.copy or key.item or key.values, told
            assert key.default is None or key.asks_for_nothing(key.default), told


def test_the_guide_has_every_option() -> None:
    page = GUIDE.read_text(encoding="utf-8")
    told = page.partition("| option |")[2].partition("\n\n")[0]
    parser = CommandParser()
    options.add_import(parser, *options.IMPORTS["verl"][1:])
    names = [action.option_strings[-1] if action.option_strings else action.dest.upper() for action in parser._actions]
    assert [name for name in names if f"`{name}" not in told and name != "--help"] == []
