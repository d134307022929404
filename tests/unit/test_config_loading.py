"""Configuration: what YAML and overrides mean, and which faults of a file are told and how."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec import inspect

from runtime.cluster.topology import fleets
from runtime.config import Config, Critic, Rollout, Source, Tracker, Warmup
from runtime.config.loading import load, mismatches, resolve, to_yaml
from runtime.config.names_of_trl import OF_TRL
from runtime.config.secret_values import refused
from runtime.errors import ConfigError
from tests.unit.config_cases import Loading, faults_of
from tests.unit.mindspeed_cases import paths


def test_scalars_follow_the_core_schema(loading: Loading) -> None:
    config = loading(
        "run: {name: no, dir: 2026-01-01, resume: 0o17}\n"
        "training: {steps: 64_000, optimizer: {learning_rate: 1e-5, min_learning_rate: 1}}\n"
        "evaluation: {before: false}\n"
    )
    assert (config.run.name, config.run.dir, config.run.resume) == ("no", "2026-01-01", "0o17")
    assert config.training.steps == 64_000
    assert config.training.optimizer.learning_rate == 1e-5
    assert config.training.optimizer.min_learning_rate == 1.0
    assert config.evaluation.before is False
    assert config.sampling == Config(run=config.run).sampling


def test_overrides_reach_sections_lists_and_defaults(loading: Loading) -> None:
    config = loading(
        "run: {name: a}\nrewards: {rules: [{name: x}, {name: y}]}",
        "run.name=b=c",
        "run.resume=auto",
        "training.optimizer.betas=[0.8, 0.9]",
        "rewards.rules.1.weight=2",
        "warmup.layers=2",
        "trackers.1.name=wandb",
        "services.trainer.env.A='1'",
        "model.reference=",
    )
    assert (config.run.name, config.run.resume) == ("b=c", "auto")
    assert config.training.optimizer.betas == (0.8, 0.9)
    assert [rule.weight for rule in config.rewards.rules] == [1.0, 2.0]
    assert config.warmup == Warmup(layers=2)
    assert config.trackers == [Tracker(name="jsonl"), Tracker(name="wandb")]
    assert config.services.trainer.env == {"A": "1"}
    assert config.model.reference == ""


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
    text = "run: {name: a}\nservices: {rollout: [{slots: 8}, {env: {B: x}}]}"
    config = loading(text, "services.rollout.1.replicas=2", "services.rollout.0.env.A=y")
    assert fleets(config) == {
        "services.rollout.0": Rollout(slots=8, env={"A": "y"}),
        "services.rollout.1": Rollout(replicas=2, env={"B": "x"}),
    }
    assert loading(to_yaml(config)) == config
    single = loading("run: {name: a}", "services.rollout.env.A=y", "services.rollout.slots=8")
    assert fleets(single) == {"services.rollout": Rollout(slots=8, env={"A": "y"})}
    assert fleets(loading("run: {name: a}", "services.rollout=[{slots: 2}, {}]")).keys() == fleets(config).keys()
    assert faults_of(loading, text, "services.rollout.1.slot=2", "services.rollout.2.slots=2") == [
        "services.rollout.2: no such item; the list has 2, counted from 0",
        "services.rollout.1.slot: unknown key; nearest is 'slots'",
    ]
    assert faults_of(loading, text, "services.rollout.slots=2")[0].startswith("services.rollout.slots: no such item")
    assert faults_of(loading, text, "services.rollout=5") == ["services.rollout: 5 is not a section of keys or a list"]


def test_override_of_one_alias_leaves_the_other(loading: Loading) -> None:
    text = "run: {name: a}\nservices: {rollout: {env: &e {A: x}}, trainer: {env: *e}}"
    config = loading(text, "services.trainer.env.A=y")
    assert (config.services.rollout.env, config.services.trainer.env) == ({"A": "x"}, {"A": "y"})


def test_merge_keys_are_not_duplicates(loading: Loading) -> None:
    config = loading("run: {name: a}\nservices:\n  reward: &r {threads: 1, replicas: 2}\n  reference: {<<: *r, threads: 3}")
    assert (config.services.reference.threads, config.services.reference.replicas) == (3, 2)


def test_all_faults_at_once_each_with_path_and_what_is_allowed(loading: Loading) -> None:
    found = faults_of(
        loading,
        "trianing: {}\n"
        "training: {optimizer: {lerning_rate: 1, betas: [0.9]}}\n"
        "services: {rollout: {slots: many, dtype: fp32, env: {A: 1}}, trainer: 5}\n"
        "evaluation: {before: yes, top_p: 2}\n"
        "rewards: {rules: [{weight: 1}]}\n"
        "warmup: {layers: 0}\n"
        "data:\n",
        "stop.accurate=1",
        "kl_coefficient=1",
        "stop.qux=1",
        "nonsense",
        "rewards.rules.4.weight=1",
        "training.steps=[",
        "services.trainer.threads.x=1",
        "warmup.accuracy=1e999",
    )
    assert sorted(found) == sorted(
        [
            "override 'nonsense': not of the form key.path=value",
            "rewards.rules.4: no such item; the list has 1, counted from 0",
            "override 'training.steps': the value is not valid YAML",
            "services.trainer.threads: services.trainer is 5, which has no keys",
            "run: missing; needs a section of keys",
            "trianing: unknown key; nearest is 'training'",
            "kl_coefficient: unknown key; nearest is 'algorithm.kl_coefficient'",
            "stop.qux: unknown key; allowed are hours, accuracy",
            "training.optimizer.lerning_rate: unknown key; nearest is 'learning_rate'",
            "training.optimizer.betas: has 1 items, not 2",
            "services.rollout.slots: 'many' is not an integer >= 1",
            "services.rollout.dtype: 'fp32' is not one of auto, bfloat16, float32",
            "services.rollout.env.A: 1 is not a string or a section of keys; put it in quotes",
            "services.trainer: 5 is not a section of keys",
            "evaluation.before: 'yes' is not true or false",
            "evaluation.top_p: 2 is not a finite number > 0 and <= 1",
            "rewards.rules.0.name: missing; needs a string",
            "warmup.layers: 0 is not an integer >= 1",
            "warmup.accuracy: inf is not a finite number >= 0 and <= 1",
            "data: null is not a section of keys",
            "stop.accurate: unknown key; nearest is 'accuracy'",
        ]
    )


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
        ("", "empty; at least run.name is needed"),
        ("# nothing\n", "empty; at least run.name is needed"),
        ("[1, 2]", "holds a list, not a mapping of keys"),
        ("run: {name: a}\nmodel: {}\nrun: {name: b}", ":3:1: not valid YAML: key 'run' occurs twice"),
        ("run: {name: [}", ":1:14: not valid YAML"),
        ("run: !!python/object:os.system {}", "not valid YAML: could not determine a constructor"),
        ("run: &a [*a]", "an alias that contains itself"),
        (b"\x00\xff\xfe", "not valid YAML"),
        (
            repeated("[", "]"),
            "not valid YAML: more than 100000 values, with what aliases repeat",
        ),
        (
            repeated("{<<: [", "]}"),
            "not valid YAML: more than 100000 values, with what aliases repeat",
        ),
        ("run: !!int x", ":1:6: not valid YAML: 'x' is not of the type int"),
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
    scalars = (
        st.none() | st.booleans() | st.integers(-3, 70000) | st.floats(-2, 2) | st.sampled_from(["", "auto", "torch", "x"])
    )
    return (
        scalars | st.lists(scalars, max_size=2) | st.dictionaries(st.sampled_from(["name", "steps", "A"]), scalars, max_size=2)
    )


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] * bool(path) + [found for key, item in items for found in paths_in(item, (*path, key))]


EVERYTHING = msgspec.json.decode(
    msgspec.json.encode(msgspec.convert({"run": {"name": "a"}, "warmup": {}, "rewards": {"rules": [{"name": "x"}]}}, Config))
)


@given(st.sampled_from(paths_in(EVERYTHING)), mutations())
@settings(max_examples=250)
def test_the_walk_agrees_with_msgspec(path: tuple[Any, ...], value: Any) -> None:
    raw = copy.deepcopy(EVERYTHING)
    node = raw
    for part in path[:-1]:
        node = node[part]
    node[path[-1]] = value
    faults = list(mismatches(raw, inspect.type_info(Config)))
    try:
        msgspec.convert(raw, Config)
        accepted = True
    except msgspec.ValidationError:
        accepted = False
    assert accepted == (not faults)


AMBIGUOUS = ["1e-5", "on", "null", "~", "<<", "0x1f", "true", "01", "1_0", "2026-01-01", "", "a: b", "-", "é"]


SEPARATORS = ["\x85", "\u2028", "\ufeff", "a\nb"]


@given(st.lists(st.text(max_size=12), min_size=8, max_size=8))
@settings(max_examples=10)
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


def test_caps_are_positive(loading: Loading) -> None:
    text = "run: {name: a}\nalgorithm: {behaviour_weight_cap: 0, correction_cap: -1, sapo_tau_negative: 0}"
    assert faults_of(loading, text) == [
        "algorithm.behaviour_weight_cap: 0 is not a finite number > 0",
        "algorithm.correction_cap: -1 is not a finite number > 0",
        "algorithm.sapo_tau_negative: 0 is not a finite number > 0",
    ]


def test_nothing_here_imports_torch() -> None:
    telemetry = (f"telemetry.{name}" for name in ("metrics", "trackers", "event_file", "summary"))
    names = ("config.loading", "config.checks", *telemetry)
    modules = ", ".join(f"runtime.{name}" for name in names)
    code = f"import sys, {modules}; sys.exit(bool({{'torch', 'transformers', 'plotly'}} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
