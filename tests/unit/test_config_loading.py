"""Configuration: what YAML, overrides, presets and references to secrets mean, and which faults of a file are told and how."""

from __future__ import annotations

import copy
import json
import stat
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec import inspect
from msgspec.structs import replace

from launcher.node.local_node import Machine
from launcher.node.topology import environment, machine_faults
from launcher.registered_names import known_names
from runtime import run_files
from runtime.cluster.topology import fleets
from runtime.config import Config, Critic, FromEnvironment, Optimizer, Rollout, Run, Source, Tracker, Training, Warmup
from runtime.config.checks import semantic_faults
from runtime.config.loading import OF_TRL, load, mismatches, preset_names, resolve, to_yaml
from runtime.config.secret_values import NOT_SHOWN, references, refused, resolved, without_secrets
from runtime.errors import ConfigError, UserError
from tests.unit.config_cases import Loading, faults_of, paths

RUN = "run: {name: a}\n"


def test_scalars_follow_the_core_schema(loading: Loading) -> None:
    training = "training: {steps: 64_000, optimizer: {learning_rate: 1e-5, min_learning_rate: 1}}"
    config = loading(f"run: {{name: no, dir: 2026-01-01, resume: 0o17}}\n{training}\nevaluation: {{before: false}}\n")
    assert (config.run.name, config.run.dir, config.run.resume) == ("no", "2026-01-01", "0o17")
    optimizer = config.training.optimizer
    assert (config.training.steps, optimizer.learning_rate, optimizer.min_learning_rate) == (64_000, 1e-5, 1.0)
    assert config.evaluation.before is False and config.sampling == Config(run=config.run).sampling


def test_overrides_reach_sections_lists_and_defaults(loading: Loading) -> None:
    config = loading(
        "run: {name: a}\nrewards: {rules: [{name: x}, {name: y}]}",
        "run.name=b=c",
        "run.resume=auto",
        "training.optimizer.betas=[0.8, 0.9]",
        "rewards.rules.1.weight=2",
        "warmup.seed=2",
        "trackers.1.name=wandb",
        "services.trainer.env.A='1'",
        "model.reference=",
    )
    assert (config.run.name, config.run.resume) == ("b=c", "auto")
    assert config.training.optimizer.betas == (0.8, 0.9)
    assert [rule.weight for rule in config.rewards.rules] == [1.0, 2.0]
    assert config.warmup == Warmup(seed=2)
    assert config.trackers == [Tracker(name="jsonl"), Tracker(name="wandb")]
    assert config.services.trainer.env == {"A": "1"}
    assert config.model.reference == ""


def test_paths_of_home_directories_are_found_wherever_they_are_named(
    loading: Loading, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "own.yaml").write_text("trainer: {engine: torch}\nrollout: {env: {HF_HOME: ~/models}}\n")
    config = loading(
        "run: {name: ~a, dir: ~/runs/a}\nservices: ~/own.yaml\nrewards: {rules: [{name: ~/own.py:near}]}",
        "data.train=[{path: ~/a.jsonl}]",
        "data.eval=~nobody-here/b.jsonl",
        "data.system_prompt=~ is a tilde, and ~/x a path",
        "model.path=~/models/small",
    )
    assert (config.run.name, config.run.dir) == ("~a", f"{tmp_path}/runs/a")
    assert (config.data.train, config.data.eval) == ([Source(path=f"{tmp_path}/a.jsonl")], "~nobody-here/b.jsonl")
    assert config.data.system_prompt == "~ is a tilde, and ~/x a path"
    assert (config.rewards.rules[0].name, config.model.path) == (f"{tmp_path}/own.py:near", f"{tmp_path}/models/small")
    (fleet,) = fleets(config).values()
    assert fleet.env == {"HF_HOME": f"{tmp_path}/models"}


def test_what_is_wrong_within_a_list_is_said_where_a_name_would_do_too(loading: Loading) -> None:
    assert loading("run: {name: a}", "data.train=[{path: x}, {path: y, weight: 2}]", "data.train.0.weight=3").data.train == [
        Source(path="x", weight=3.0),
        Source(path="y", weight=2.0),
    ]
    assert faults_of(loading, "run: {name: a}", "data.train=[{pth: x}, {path: y, weight: 0}, z]") == [
        "data.train.0.pth: unknown key; nearest is 'path'",
        "data.train.0.path: missing; needs a string",
        "data.train.1.weight: 0 is not a finite number > 0",
        "data.train.2: 'z' is not a section of keys",
    ]
    assert faults_of(loading, "run: {name: a}", "data.train={a: b}") == ["data.train: a mapping is not a string or a list"]


def test_rollouts_are_one_fleet_or_several(loading: Loading) -> None:
    text = "run: {name: a}\nservices: {rollout: [{max_num_seqs: 8}, {env: {B: x}}]}"
    config = loading(text, "services.rollout.1.replicas=2", "services.rollout.0.env.A=y")
    assert fleets(config) == {
        "services.rollout.0": Rollout(max_num_seqs=8, env={"A": "y"}),
        "services.rollout.1": Rollout(replicas=2, env={"B": "x"}),
    }
    assert loading(to_yaml(config)) == config
    single = loading("run: {name: a}", "services.rollout.env.A=y", "services.rollout.max_num_seqs=8")
    assert fleets(single) == {"services.rollout": Rollout(max_num_seqs=8, env={"A": "y"})}
    assert fleets(loading("run: {name: a}", "services.rollout=[{max_num_seqs: 2}, {}]")).keys() == fleets(config).keys()
    assert faults_of(loading, text, "services.rollout.1.engin=2", "services.rollout.2.max_num_seqs=2") == [
        "services.rollout.2: no such item; the list has 2, counted from 0",
        "services.rollout.1.engin: unknown key; nearest is 'engine'",
    ]
    assert faults_of(loading, text, "services.rollout.max_num_seqs=2")[0].startswith(
        "services.rollout.max_num_seqs: no such item"
    )
    assert faults_of(loading, text, "services.rollout=5") == ["services.rollout: 5 is not a section of keys or a list"]


def test_aliases_are_copies_and_merge_keys_no_duplicates(loading: Loading) -> None:
    text = "run: {name: a}\nservices: {rollout: {env: &e {A: x}}, trainer: {env: *e}}"
    config = loading(text, "services.trainer.env.A=y")
    assert (config.services.rollout.env, config.services.trainer.env) == ({"A": "x"}, {"A": "y"})
    config = loading("run: {name: a}\nservices:\n  reward: &r {restarts: 1, replicas: 2}\n  reference: {<<: *r, restarts: 3}")
    assert (config.services.reference.restarts, config.services.reference.replicas) == (3, 2)


FAULTY = """
trianing: {}
training: {optimizer: {lerning_rate: 1, betas: [0.9]}}
algorithm: {dual_clip: -1, correction_cap: -1}
services: {rollout: {max_num_seqs: many, dtype: fp32, env: {A: 1}}, trainer: 5}
evaluation: {before: yes, top_p: 2}
rewards: {rules: [{weight: 1}]}
warmup: {eval_problems: 0}
data:
"""
OVERRIDES = ("stop.accurate=1", "kl_coefficient=1", "stop.qux=1", "nonsense", "rewards.rules.4.weight=1", "training.steps=[")
TOLD = """
override 'nonsense': not of the form key.path=value
rewards.rules.4: no such item; the list has 1, counted from 0
override 'training.steps': the value is not valid YAML
services.trainer.env: services.trainer is 5, which has no keys
run: missing; needs a section of keys
trianing: unknown key; nearest is 'training'
kl_coefficient: unknown key; nearest is 'algorithm.kl_coefficient'
stop.qux: unknown key; allowed are hours, accuracy
training.optimizer.lerning_rate: unknown key; nearest is 'learning_rate'
training.optimizer.betas: has 1 items, not 2
algorithm.dual_clip: -1 is not a finite number >= 0
algorithm.correction_cap: -1 is not a finite number > 0
services.rollout.max_num_seqs: 'many' is not an integer >= 1
services.rollout.dtype: 'fp32' is not one of auto, bfloat16, float32
services.rollout.env.A: 1 is not a string or a section of keys; put it in quotes
services.trainer: 5 is not a section of keys
evaluation.before: 'yes' is not true or false
evaluation.top_p: 2 is not a finite number > 0 and <= 1
rewards.rules.0.name: missing; needs a string
warmup.eval_problems: 0 is not an integer >= 1
warmup.accuracy: inf is not a finite number >= 0 and <= 1
data: null is not a section of keys
stop.accurate: unknown key; nearest is 'accuracy'
"""


def test_all_faults_at_once_each_with_path_and_what_is_allowed(loading: Loading) -> None:
    found = faults_of(loading, FAULTY, *OVERRIDES, "services.trainer.env.x=1", "warmup.accuracy=1e999")
    assert sorted(found) == sorted(TOLD.strip().splitlines())


def test_a_key_of_trl_is_answered_with_ours(loading: Loading) -> None:
    found = faults_of(loading, "run: {name: a}\nalgorithm: {epsilon_high: 0.28, beta: 0.04}\nreport_to: wandb\n")
    assert found == [
        "algorithm.epsilon_high: unknown key; TRL's epsilon_high is algorithm.clip_high here",
        "algorithm.beta: unknown key; TRL's beta is algorithm.kl_coefficient here",
        "report_to: unknown key; TRL's report_to is trackers here",
    ]
    ours = {path for ours in OF_TRL.values() for path in ours.split(" and ")}
    assert ours <= set(paths(inspect.type_info(Config)))


def repeated(begin: str, end: str) -> str:
    """Few bytes of aliases, of which each repeats the one before ten times: 10 to the power of 10 values."""
    lines = [f"a{depth}: &a{depth} {begin}{', '.join([f'*a{depth - 1}'] * 10)}{end}" for depth in range(1, 10)]
    return "\n".join(["a0: &a0 {x: 1}", *lines])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# nothing\n", "empty; at least run.name is needed"),
        ("[1, 2]", "holds a list, not a mapping of keys"),
        ("run: {name: a}\nmodel: {}\nrun: {name: b}", ":3:1: not valid YAML: key 'run' occurs twice"),
        ("run: {name: [}", ":1:14: not valid YAML"),
        ("run: !!python/object:os.system {}", "not valid YAML: could not determine a constructor"),
        ("run: &a [*a]", "an alias that contains itself"),
        (b"\x00\xff\xfe", "not valid YAML"),
        (repeated("[", "]"), "not valid YAML: more than 100000 values, with what aliases repeat"),
        (repeated("{<<: [", "]}"), "not valid YAML: more than 100000 values, with what aliases repeat"),
        ("run: !!timestamp x", ":1:6: not valid YAML: 'x' is not of the type timestamp"),
        ("run: " + "9" * 5000, "is not of the type int"),
    ],
)
def test_file_faults_are_one_line(loading: Loading, text: str | bytes, said: str) -> None:
    (fault,) = faults_of(loading, text)
    assert "run.yaml" in fault and said in fault and "\n" not in fault


def test_missing_file_and_folder(tmp_path: Path) -> None:
    for path, said in ((tmp_path / "no.yaml", "no such file or directory"), (tmp_path, "is a directory")):
        with pytest.raises(ConfigError, match=said):
            load(path)


def mutations() -> st.SearchStrategy[Any]:
    scalars = st.none() | st.booleans() | st.integers(-3, 70000) | st.floats(-2, 2) | st.sampled_from(["", "auto", "torch"])
    keys = st.sampled_from(["name", "steps", "A"])
    return scalars | st.lists(scalars, max_size=2) | st.dictionaries(keys, scalars, max_size=2)


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] * bool(path) + [found for key, item in items for found in paths_in(item, (*path, key))]


EVERYTHING = msgspec.json.decode(
    msgspec.json.encode(msgspec.convert({"run": {"name": "a"}, "warmup": {}, "rewards": {"rules": [{"name": "x"}]}}, Config))
)


@given(st.sampled_from(paths_in(EVERYTHING)), mutations())
def test_the_walk_agrees_with_msgspec(path: tuple[Any, ...], value: Any) -> None:
    raw = copy.deepcopy(EVERYTHING)
    node = raw
    for part in path[:-1]:
        node = node[part]
    node[path[-1]] = value
    faults = list(mismatches(raw, inspect.type_info(Config)))
    with pytest.raises(msgspec.ValidationError) if faults else nullcontext():
        msgspec.convert(raw, Config)


AMBIGUOUS = ["1e-5", "on", "null", "~", "<<", "0x1f", "true", "01", "1_0", "2026-01-01", "", "a: b", "-", "é"]
SEPARATORS = ["\x85", "\u2028", "\ufeff", "a\nb"]


@given(st.lists(st.text(max_size=12), min_size=8, max_size=8))
@settings(max_examples=5)
def test_yaml_round_trip(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    env = {text: text for text in texts + AMBIGUOUS + SEPARATORS}
    assume(not refused({"env": dict(env)}, "services.trainer"))  # Hypothesis knows the words of the package, SECRET for one
    config = msgspec.convert({**EVERYTHING, "services": {"trainer": {"env": env}}, "stop": {"hours": 1e-7}}, Config)
    path = tmp_path_factory.getbasetemp() / "round.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    assert load(path) == config


def test_resolve_fills_derived_values_once_they_are_known(loading: Loading) -> None:
    first = resolve(loading("run: {name: q}\nwarmup: {}\nsampling: {max_new_tokens: 33}"))
    assert (first.run.dir, first.evaluation.max_new_tokens, first.model.reference) == ("runs/q", 33, "")
    assert first.critic is None
    critic = resolve(msgspec.structs.replace(first, critic=Critic()))
    named = msgspec.structs.replace(critic, model=msgspec.structs.replace(first.model, path="m"))
    assert resolve(named).model.reference == "m"
    assert resolve(named).critic == Critic(path="m")
    assert resolve(resolve(named)) == resolve(named)
    kept = resolve(loading("run: {name: q, dir: d}\nmodel: {path: m, reference: r}\nevaluation: {max_new_tokens: 5}"))
    assert (kept.run.dir, kept.evaluation.max_new_tokens, kept.model.reference) == ("d", 5, "r")


def test_a_preset_fills_what_the_user_leaves_out(loading: Loading, tmp_path: Path) -> None:
    config = loading(RUN + "algorithm: {preset: dr_grpo, clip_low: 0.1}", "algorithm.clip_high=0.28").algorithm
    assert (config.preset, config.group_std, config.aggregation) == ("dr_grpo", "none", "dr_grpo")
    assert (config.clip_low, config.clip_high) == (0.1, 0.28)  # the second is the schema's default, but said
    assert loading(RUN, "algorithm.preset=dr_grpo").algorithm.clip_high == 0.2
    path = tmp_path / "mine.yaml"
    path.write_text("loss: ppo\nclip_low: 0.5\n")
    own = loading(RUN, f"algorithm.preset={path}")
    assert (own.algorithm.loss, own.algorithm.clip_low) == ("ppo", 0.5)
    path.unlink()
    assert loading(to_yaml(own)) == own, "a resolved file outlives its preset"


@pytest.mark.parametrize(("rate", "least"), [(2e-6, 1e-6), (0.0, 0.0)])
def test_a_role_has_the_optimizer_of_training_at_its_own_rate(rate: float, least: float) -> None:
    optimizer = Optimizer(name="muon", learning_rate=rate, min_learning_rate=least, warmup_steps=3)
    config = Config(run=Run(name="a"), training=Training(optimizer=optimizer), critic=Critic(learning_rate=1e-4))
    assert config.optimizer_of("trainer") == optimizer
    for role, own in (("critic", 1e-4), ("sft", 1e-5)):
        expected = own / 2 if rate else 0.0
        assert config.optimizer_of(role) == replace(optimizer, learning_rate=own, min_learning_rate=expected)


def test_options_of_a_preset_are_merged_by_name_and_count_for_its_own_loss(loading: Loading) -> None:
    merged = loading(RUN, "algorithm.preset=kl_cov", "algorithm.loss_options.share=0.1")
    assert merged.algorithm.loss_options == {"share": 0.1, "kl": 1.0}
    assert loading(RUN, "algorithm={preset: kl_cov, loss: ppo}").algorithm.loss_options == {}


def test_every_packaged_preset_is_sound(loading: Loading, sound: dict[str, Any]) -> None:
    known = {key: names for key, names in known_names().items() if key.startswith(("algorithm", "critic"))}
    assert len(preset_names("algorithm.preset")) >= 7
    for name in preset_names("algorithm.preset"):
        config = loading(RUN, f"algorithm.preset={name}")
        sections: dict[str, Any] = {"algorithm": msgspec.to_builtins(config.algorithm)}
        if config.algorithm.advantage in known["critic"]:
            sections["critic"] = {}
        assert semantic_faults(resolve(msgspec.convert(sound | sections, Config)), known, 1 << 40) == [], name


def test_faults_of_presets_name_their_file(loading: Loading, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    for text, said in (
        (None, "no such file or directory"),
        ("los: ppo", "los: unknown key; nearest is 'loss'"),
        ("clip_low: -1", "clip_low: -1 is not a finite number >= 0"),
        ("preset: grpo", "names a preset itself; they do not nest"),
        ("", "empty; at least one key of section algorithm is needed"),
    ):
        if text is not None:
            path.write_text(text)
        assert faults_of(loading, RUN, f"algorithm.preset={path}") == [f"algorithm.preset: {path}: {said}"]
    names = ", ".join(preset_names("algorithm.preset"))
    assert faults_of(loading, RUN, "algorithm.preset=dpo") == [
        f"algorithm.preset: 'dpo' is not one of {names}, nor a path to FILE.yaml"
    ]
    (fault,) = faults_of(loading, RUN, "algorithm.preset=5")
    assert fault == "algorithm.preset: 5 is not a string; put it in quotes"


VALUE = "s3cr3t-value"


SECRETS: dict[str, Any] = {
    "env.WANDB_API_KEY": VALUE,
    "env.hf-token": VALUE,
    "env.DB_PASSWD": VALUE,
    "env.HTTPS_PROXY": f"http://user:{VALUE}@proxy:8080",
    "env.A_SECRET": 12345678,  # no string, and not shown as the fault that this is
    "engine_args.hf_token": VALUE,
    "engine_args.kv.apiKey": VALUE,
    "engine_args.kv.password.of": VALUE,
    "engine_args.kv.urls.0": f"redis://:{VALUE}@host/0",
}


@pytest.mark.parametrize("key", SECRETS)
def test_a_secrets_value_is_refused_and_not_shown(loading: Loading, key: str) -> None:
    """In the file, and in an override."""
    section, *names = key.split(".")
    given = SECRETS[key]
    for name in reversed(names):
        given = [given] if name == "0" else {name: given}
    said = "a secret, whose value must not stand in the configuration; must be {from: NAME}, the environment variable that has"
    file = json.dumps({"run": {"name": "a"}, "services": {"rollout": [{section: given}]}})
    override = f"services.rollout.0.{section}={json.dumps(given)}"
    for found in (faults_of(loading, file), faults_of(loading, RUN + "services: {rollout: [{}]}", override)):
        assert found == [f"services.rollout.0.{key}: {said} it"]


def test_no_fault_shows_a_secrets_value(loading: Loading, tmp_path: Path) -> None:
    (fault,) = faults_of(loading, RUN, f"services.trainer.env.HF_TOKEN=[{VALUE}")
    assert fault == "override 'services.trainer.env.HF_TOKEN': the value is not valid YAML"
    preset = tmp_path / "mine.yaml"
    preset.write_text(f"trainer: {{env: {{HF_TOKEN: {VALUE}}}}}\n")
    (fault,) = faults_of(loading, RUN + f"services: {{platform: {preset}}}")
    assert fault.startswith(f"services.platform: {preset}: services.trainer.env.HF_TOKEN: a secret") and VALUE not in fault


def test_what_only_looks_like_a_secret_is_taken(loading: Loading) -> None:
    env = {"TOKENIZERS_PARALLELISM": "false", "KEYBOARD": "x", "MAX_TOKENS": "5", "PROXY": "http://proxy:80/a@b", "A_KEY": ""}
    arguments = {"hf_overrides": {"pad_token_id": 0, "num_key_value_heads": 2}, "hf_token": True, "tokens": "x"}
    config = loading(json.dumps({"run": {"name": "a"}, "services": {"rollout": {"env": env, "engine_args": arguments}}}))
    assert isinstance(config.services.rollout, Rollout)
    assert (config.services.rollout.env, config.services.rollout.engine_args) == (env, arguments)


def test_a_reference_is_kept_as_one(loading: Loading) -> None:
    arguments = "services.rollout.engine_args.hf_token={from: HF_TOKEN}"
    config = loading(RUN, "services.rollout.env.HF_TOKEN={from: MY_TOKEN}", arguments)
    assert isinstance(config.services.rollout, Rollout)
    assert config.services.rollout.env == {"HF_TOKEN": FromEnvironment(variable="MY_TOKEN")}
    assert config.services.rollout.engine_args == {"hf_token": {"from": "HF_TOKEN"}}
    assert loading(json.dumps(msgspec.to_builtins(config))) == config
    (unknown, _) = faults_of(loading, RUN, "services.trainer.env.A={form: B}")
    assert unknown == "services.trainer.env.A.form: unknown key; nearest is 'from'"


def of_roles(**roles: Any) -> Config:
    return msgspec.convert({"run": {"name": "a"}, "services": roles}, Config)


def test_who_sees_a_configuration_sees_no_value_that_may_be_a_secret() -> None:
    """Also where one is there: earlier versions took it; whatever it is called, and in a URL anywhere."""
    arguments: dict[str, Any] = {
        "auth": VALUE,
        "HF_PAT": VALUE,
        "headers": [VALUE],
        "dtype": "float16",
        "hf_token": VALUE,
        "block_size": 16,
        "kv": [{"url": f"redis://me:{VALUE}@host"}],
        "key": {"from": "KEY"},
    }
    roles = {"rollout": [{"engine_args": arguments}], "trainer": {"env": {"UNKNOWN": VALUE, "HF_TOKEN": {"from": "MINE"}}}}
    given = {"run": {"name": "a"}, "services": roles, "model": {"path": f"https://me:{VALUE}@host/m"}}
    config = msgspec.convert(given, Config)
    shown = without_secrets(config)
    assert VALUE not in json.dumps(shown)
    assert shown["services"]["trainer"]["env"] == {"UNKNOWN": NOT_SHOWN, "HF_TOKEN": {"from": "MINE"}}
    assert shown["model"]["path"] == f"https://{NOT_SHOWN}@host/m"
    hidden: dict[str, Any] = dict.fromkeys(("auth", "HF_PAT"), NOT_SHOWN) | {"headers": [NOT_SHOWN], "dtype": "float16"}
    hidden |= {"hf_token": NOT_SHOWN, "block_size": 16, "kv": [{"url": NOT_SHOWN}], "key": {"from": "KEY"}}
    assert shown["services"]["rollout"][0]["engine_args"] == hidden
    assert shown["services"]["critic"] == msgspec.to_builtins(config)["services"]["critic"]
    assert config.services.trainer.env["UNKNOWN"] == VALUE  # it is not changed itself


def test_references_are_resolved_from_the_processs_own_environment() -> None:
    arguments = {"hf_token": {"from": "A"}, "nested": [{"key": {"from": "B"}}, 5], "plain": "x"}
    found = resolved(arguments, {"A": "1", "B": "2"}, "services.rollout.engine_args")
    assert found == {"hf_token": "1", "nested": [{"key": "2"}, 5], "plain": "x"}
    with pytest.raises(UserError, match=r"^services.rollout.engine_args.nested.0.key: \{from: B\}: .* has no B$"):
        resolved(arguments, {"A": "1"}, "services.rollout.engine_args")


def test_a_role_reads_of_its_machine_what_it_is_not_given_itself() -> None:
    rollout = {"env": {"X": {"from": "Y"}}, "engine_args": {"a": {"from": "X"}, "b": {"from": "Z"}}}
    roles = of_roles(rollout=rollout, trainer={"env": {"LD_PRELOAD": {"from": "MINE"}}}).services
    assert isinstance(roles.rollout, Rollout)
    assert references(roles.rollout, "services.rollout") == {
        "services.rollout.env.X": "Y",
        "services.rollout.engine_args.b": "Z",
    }
    assert environment(roles.trainer, 1, Machine())["LD_PRELOAD"] == FromEnvironment(variable="MINE")


def test_a_variable_that_this_machine_has_not_is_a_fault_before_anything_starts() -> None:
    roles: dict[str, Any] = {"trainer": {"env": {"HF_TOKEN": {"from": "MINE"}}}}
    said = "services.trainer.env.HF_TOKEN: {from: MINE}: this machine's environment has no MINE"
    assert list(machine_faults(of_roles(**roles), Machine())) == [said]
    assert list(machine_faults(of_roles(**roles), Machine(variables=frozenset({"MINE"})))) == []
    # With other nodes the role may be on one of them, which is asked when the process is started.
    assert list(machine_faults(of_roles(**roles, coordinator={"host": "10.0.0.1"}), Machine())) == []


def test_a_private_file_is_its_owners_alone_also_where_another_was(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("old")
    path.chmod(0o666)
    (tmp_path / "config.yaml.partial").write_text("of one that was killed")
    run_files.write_private(path, "ü")
    assert path.read_text(encoding="utf-8") == "ü"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]
    partial, elsewhere = tmp_path / "config.yaml.partial", tmp_path / "elsewhere"
    partial.symlink_to(elsewhere)
    run_files.write_private(path, "not through a link")
    assert not elsewhere.exists() and not path.is_symlink()
    with partial.open("w+") as held:  # by who made it before
        run_files.write_private(path, "not to who holds it")
        assert held.read() == "" and path.read_text() == "not to who holds it"
