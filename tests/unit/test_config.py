"""Configuration: what YAML means, which faults are told and how, and what the cross-checks see without torch."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

from runtime import config_loading
from runtime.config import Config, Critic, Rollout, Source, Tracker, Warmup
from runtime.config_checks import kv_cache_bytes, semantic_faults
from runtime.config_loading import load, preset_names, resolve, schema, to_yaml
from runtime.errors import ConfigError
from runtime.topology import fleets

Loading = Callable[..., Config]


@pytest.fixture
def loading(tmp_path: Path) -> Loading:
    def load_text(text: str | bytes, *overrides: str) -> Config:
        path = tmp_path / "run.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return load(path, overrides)

    return load_text


def faults_of(loading: Loading, text: str | bytes, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        loading(text, *overrides)
    assert str(caught.value).splitlines() == caught.value.faults
    return caught.value.faults


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
            "override 'training.steps=[': the value is not valid YAML",
            "services.trainer.threads: services.trainer is 5, which has no keys",
            "run: missing; needs a section of keys",
            "trianing: unknown key; nearest is 'training'",
            "kl_coefficient: unknown key; nearest is 'algorithm.kl_coefficient'",
            "stop.qux: unknown key; allowed are hours, accuracy",
            "training.optimizer.lerning_rate: unknown key; nearest is 'learning_rate'",
            "training.optimizer.betas: has 1 items, not 2",
            "services.rollout.slots: 'many' is not an integer >= 1",
            "services.rollout.dtype: 'fp32' is not one of auto, bfloat16, float32",
            "services.rollout.env.A: 1 is not a string; put it in quotes",
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
    faults = list(config_loading._faults(raw, inspect.type_info(Config), ""))
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


def test_schema_describes_every_section() -> None:
    found = schema()
    assert found["$defs"]["Training"]["properties"]["staleness"] == {"minimum": 0, "default": 2, "type": "integer"}
    assert "staleness" in found["$defs"]["Training"]["description"]
    assert found["$defs"]["Run"]["additionalProperties"] is False
    assert json.loads(json.dumps(found))["$ref"] == "#/$defs/Config"


# --- cross-checks ---


def model_folder(path: Path, **changes: Any) -> Path:
    path.mkdir(parents=True)
    config = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "vocab_size": 300,
        "max_position_embeddings": 128,
        "torch_dtype": "bfloat16",
    }
    (path / "config.json").write_text(json.dumps(config | changes))
    (path / "tokenizer.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"w")
    return path


@pytest.fixture
def sound(tmp_path: Path) -> dict[str, Any]:
    """A configuration without faults, as raw YAML data."""
    (tmp_path / "train.jsonl").write_text("{}\n")
    return {
        "run": {"name": "a"},
        "model": {"path": str(model_folder(tmp_path / "model"))},
        "data": {"train": str(tmp_path / "train.jsonl"), "max_prompt_tokens": 64},
        "sampling": {"max_new_tokens": 64},
        "rewards": {"rules": [{"name": "accuracy"}]},
    }


KNOWN = {
    "algorithm.advantage": ["gae", "group_norm", "rloo"],
    "critic": ["gae"],
    "algorithm.loss": ["decoupled", "gspo", "ppo"],
    "algorithm.correction": ["none", "icepop"],
    "algorithm.aggregation": ["token_mean"],
    "algorithm.kl": ["k1", "k3"],
    "data.handler": ["plain"],
    "rewards.rules": ["accuracy", "format"],
}


def checked(raw: dict[str, Any], available_bytes: int | None = 1 << 40, **changes: dict[str, Any]) -> list[str]:
    merged = raw | {section: raw.get(section, {}) | values for section, values in changes.items()}
    return semantic_faults(resolve(msgspec.convert(merged, Config)), KNOWN, available_bytes)


def test_a_sound_configuration_has_no_faults(sound: dict[str, Any]) -> None:
    assert checked(sound) == []
    assert checked(sound, available_bytes=None) == []


@pytest.mark.parametrize("in_flight", ["auto", "keep", "recompute", "drain"])
def test_without_staleness_weights_cannot_change_under_a_sample(sound: dict[str, Any], in_flight: str) -> None:
    assert checked(sound, publication={"in_flight": in_flight}) == []
    faults = checked(sound, publication={"in_flight": in_flight}, training={"staleness": 0})
    if in_flight in ("auto", "drain"):
        assert faults == []
    else:
        (fault,) = faults
        assert fault.startswith(
            f"publication.in_flight: {in_flight} swaps weights under samples; with training.staleness 0 each"
        )


def test_vllm_takes_whole_versions_alone(sound: dict[str, Any]) -> None:
    rollout = {"engine": "vllm", "python": "/elsewhere/bin/python"}
    for engine, staging, sound_so in (({}, "inplace", True), (rollout, "shadow", True), (rollout, "inplace", False)):
        faults = checked(sound, publication={"staging": staging}, services={"rollout": engine})
        assert sound_so == (not any(fault.startswith("publication.staging: inplace is for engine torch") for fault in faults))


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
    assert checked(raw, evaluation={"every": 5}, algorithm={"kl_coefficient": 0.1}) == []
    assert checked(raw, warmup={"hidden_size": 100, "heads": 3, "kv_heads": 2}) == [
        "warmup.hidden_size: 100 is not a multiple of 2 · heads = 6",
        "warmup.kv_heads: 2 does not divide heads = 3",
    ]


PPO: dict[str, Any] = {"algorithm": {"advantage": "gae"}, "critic": {}}


def test_sound_steps_of_several_updates(sound: dict[str, Any]) -> None:
    assert checked(sound, **PPO) == []
    shared = {"trainer": {"processes": 2}, "critic": {"processes": 4}}
    assert checked(sound, **PPO, training={"mini_batch_size": 4, "epochs": 2}, services=shared) == []
    assert checked(sound, services={"critic": {"processes": 3}}) == []  # there is none
    assert checked(sound, reference={"mode": "none"}) == []
    assert checked(sound, reference={"mode": "adapter_off"}, lora={}, algorithm={"kl_coefficient": 0.1}) == []


TWO_ROLLOUTS = {"replicas": 2, "devices": [0, 1]}


@pytest.mark.parametrize(
    "changes",
    [
        {"services": {"trainer": {"devices": [1]}, "rollout": TWO_ROLLOUTS}},
        {"services": {"trainer": {"devices": [1]}, "rollout": TWO_ROLLOUTS}, "publication": {"transport": "shared_memory"}},
        {"services": {"trainer": {"devices": [1]}, "rollout": TWO_ROLLOUTS}, "publication": {"backend": "gloo"}},
        {"services": {"trainer": {"devices": [2]}, "rollout": TWO_ROLLOUTS}, "publication": {"backend": "hccl"}},
        {"publication": {"transport": "collective"}},
        {"publication": {"backend": "nccl"}},  # each has a device of its own
    ],
)
def test_weights_may_go_past_a_shared_device(sound: dict[str, Any], changes: dict[str, Any]) -> None:
    assert checked(sound, **changes) == []


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
            {"algorithm": {"loss": "ppo", "correction": "icepop", "correction_low": 1.5}},
            "algorithm.correction_low: [1.5, 5] leaves out 1, the weight where both engines agree",
        ),
        (
            {"algorithm": {"loss": "gspo"}},
            "algorithm.aggregation: 'token_mean' is not seq_mean_token_mean; loss gspo is one value a sample",
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
            {"publication": {"transport": "filesystem"}},
            "publication.folder: missing; transport filesystem needs a folder that trainer and rollouts share",
        ),
        (
            {"publication": {"transport": "filesystem", "folder": "weights", "senders": "all"}},
            "publication.senders: all is not for transport filesystem, whose folder one process writes; must be one",
        ),
        (
            {"publication": {"transport": "filesystem", "folder": "/dev/null/weights"}},
            "publication.folder: '/dev/null/weights' cannot be made, as /dev/null is a file",
        ),
        (
            {"publication": {"transport": "filesystem", "folder": "/tmp", "backend": "gloo"}},
            "publication.backend: gloo is for a collective; transport filesystem has none, so must be auto",
        ),
        (
            {"publication": {"transport": "delta", "folder": "/tmp", "dtype": "bfloat16"}},
            "publication.folder: '/tmp' is for transport filesystem alone, and it is delta",
        ),
        ({"publication": {"full_every": 7}}, "publication.full_every: 7 is for transport delta alone, and it is auto"),
    ],
)
def test_each_cross_check(sound: dict[str, Any], changes: dict[str, Any], fault: str) -> None:
    (found,) = checked(sound, **changes)
    assert found.startswith(fault)


DELTAS = {"transport": "delta", "full_every": 7, "backend": "gloo", "dtype": "bfloat16"}


@pytest.mark.parametrize("settings", [DELTAS, {"transport": "filesystem"}])
def test_weights_travel_by_a_shared_folder_or_as_deltas(
    sound: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    folder = str(tmp_path / "to" / "come") if settings["transport"] == "filesystem" else ""
    assert checked(sound, publication={**settings, "folder": folder}) == []
    if folder:
        monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)
        assert checked(sound, publication={**settings, "folder": folder}) == [
            f"publication.folder: '{folder}' cannot be written"
        ]


@pytest.mark.parametrize(
    ("declared", "model", "wire", "told"),
    [
        ({"dtype": None, "torch_dtype": None}, "auto", "auto", "float32 (the policy's own)"),
        ({"dtype": None, "torch_dtype": "bfloat16"}, "auto", "auto", ""),
        ({"dtype": "float16"}, "auto", "auto", ""),
        ({"dtype": "bfloat16"}, "float32", "auto", "float32 (the policy's own)"),
        ({"dtype": "bfloat16"}, "auto", "float32", "float32"),
        ({}, "float32", "bfloat16", ""),
    ],
)
def test_deltas_of_float32_would_be_whole_versions(
    sound: dict[str, Any], declared: dict[str, str | None], model: str, wire: str, told: str
) -> None:
    path = Path(sound["model"]["path"]) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | declared))
    faults = checked(sound, model={"dtype": model}, publication={"transport": "delta", "dtype": wire})
    assert faults == [
        f"publication.dtype: {told} changes in nearly every element, and transport delta would send it all; "
        "must be bfloat16 or float16"
    ] * bool(told)
    assert checked(sound, model={"dtype": model}, publication={"transport": "collective", "dtype": wire}) == []


def test_model_folders(sound: dict[str, Any], tmp_path: Path) -> None:
    policy = Path(sound["model"]["path"])
    wide = model_folder(tmp_path / "wide", vocab_size=301)
    (fault,) = checked(sound, model={"reference": str(wide)})
    assert fault == f"model.reference: '{wide}' has a vocabulary of 301 tokens, the policy one of 300"
    (fault,) = checked(sound, **(PPO | {"critic": {"path": str(wide)}}))
    assert fault == f"critic.path: '{wide}' has a vocabulary of 301 tokens, the policy one of 300"
    (model_folder(tmp_path / "empty") / "model.safetensors").unlink()
    (fault,) = checked(sound, **(PPO | {"critic": {"path": str(tmp_path / "empty")}}))
    assert fault == f"critic.path: '{tmp_path / 'empty'}' has no weights (*.safetensors)"

    (policy / "model.safetensors").unlink()
    assert checked(sound) == [f"model.path: '{policy}' has no weights (*.safetensors)"]
    (policy / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}})
    )
    assert checked(sound) == [f"model.path: '{policy}' lacks 1.safetensors, which its index names, and 1 more"]
    for shard in "12":
        (policy / f"{shard}.safetensors").write_bytes(b"w")
    assert checked(sound) == []
    (policy / "tokenizer.json").unlink()
    (policy / "config.json").write_text("{")
    assert checked(sound) == [
        f"model.path: '{policy}' has no config.json of a Llama-like model",
        f"model.path: '{policy}' has no tokenizer.json",
    ]


def test_other_experts_are_generated_and_referenced_by_no_embedded_engine(sound: dict[str, Any], tmp_path: Path) -> None:
    sparse = str(model_folder(tmp_path / "sparse", model_type="qwen2_moe", num_experts=4))
    rollouts = "services.rollout.engine: torch has experts of qwen3_moe alone, and model.path is a qwen2_moe; must be vllm"
    reference = "services.reference.engine: torch has experts of qwen3_moe alone, and the model is a qwen2_moe; must be another"
    ours = str(model_folder(tmp_path / "ours", model_type="qwen3_moe", num_experts=4))
    assert checked(sound, model={"path": ours}, algorithm={"kl_coefficient": 0.1}) == []
    assert checked(sound, model={"path": sparse}) == [rollouts]
    diverging = {"algorithm": {"kl_coefficient": 0.1}}
    assert checked(sound, model={"path": sparse}, **diverging) == [rollouts, reference]
    assert checked(sound, model={"reference": sparse}, **diverging) == [reference]
    assert checked(sound, model={"path": sparse, "reference": sound["model"]["path"]}, **diverging) == [rollouts]


def test_kv_cache(sound: dict[str, Any]) -> None:
    # Qwen2.5-7B: 28 layers, 4 KV heads of 128; bf16 costs 57,344 bytes a token.
    qwen = {"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "hidden_size": 3584}
    assert kv_cache_bytes(qwen, 1, 1, 2) == 57_344
    assert kv_cache_bytes(qwen, 16, 1000, 4) == 57_344 * 2 * 16_000
    del qwen["num_key_value_heads"]
    assert kv_cache_bytes(qwen | {"head_dim": 64}, 1, 1, 2) == 57_344 * 7 // 2

    needed = 2 * (2 * 2 * 2 * 16 * 2) * 64 * 128  # 2 replicas of bf16
    services = {"rollout": {"replicas": 2, "dtype": "bfloat16"}}
    assert checked(sound, available_bytes=needed, services=services) == []
    (fault,) = checked(sound, available_bytes=needed - 1, services=services)
    assert fault.startswith("services.rollout.slots: 64 slots of 128 tokens in 2 replica(s) need 0.0 GiB of KV cache")
    fleets = {"rollout": [{"dtype": "bfloat16"}, {"replicas": 1, "dtype": "bfloat16"}]}
    assert checked(sound, available_bytes=needed, services=fleets) == []
    (fault,) = checked(sound, available_bytes=needed - 1, services=fleets)
    assert fault.startswith("services.rollout.1.slots: 64 slots")
    (fault,) = checked(sound, available_bytes=3 << 30, services={"rollout": {"slots": 1 << 18, "dtype": "float32"}})
    assert fault.endswith("need 16.0 GiB of KV cache; 3.0 GiB are available")


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


class TestPresets:
    def test_fills_what_the_user_leaves_out(self, loading: Loading) -> None:
        text = "run: {name: a}\nalgorithm: {preset: dr_grpo, clip_low: 0.1}"
        config = loading(text, "algorithm.clip_high=0.28").algorithm
        assert (config.preset, config.group_std, config.aggregation) == ("dr_grpo", "none", "dr_grpo")
        assert (config.clip_low, config.clip_high) == (0.1, 0.28)  # the second is the schema's default, but said
        assert loading("run: {name: a}", "algorithm.preset=dr_grpo").algorithm.clip_high == 0.2

    def test_every_packaged_one_is_sound(self, loading: Loading, sound: dict[str, Any]) -> None:
        from launcher.known import known_names

        assert len(preset_names("algorithm.preset")) >= 7
        for name in preset_names("algorithm.preset"):
            config = loading("run: {name: a}", f"algorithm.preset={name}")
            known = {key: names for key, names in known_names().items() if key.startswith(("algorithm", "critic"))}
            sections: dict[str, Any] = {"algorithm": msgspec.to_builtins(config.algorithm)}
            if config.algorithm.advantage in known["critic"]:
                sections["critic"] = {}
            checked_config = msgspec.convert(sound | sections, Config)
            assert semantic_faults(resolve(checked_config), known, 1 << 40) == [], name

    def test_a_file_of_ones_own(self, loading: Loading, tmp_path: Path) -> None:
        (tmp_path / "mine.yaml").write_text("loss: ppo\nclip_low: 0.5\n")
        config = loading("run: {name: a}", f"algorithm.preset={tmp_path}/mine.yaml").algorithm
        assert (config.loss, config.clip_low) == ("ppo", 0.5)

    def test_a_resolved_file_outlives_its_preset(self, loading: Loading, tmp_path: Path) -> None:
        path = tmp_path / "mine.yaml"
        path.write_text("loss: ppo\n")
        first = loading("run: {name: a}", f"algorithm.preset={path}")
        path.unlink()
        assert loading(to_yaml(first)) == first

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("los: ppo", "{path}: los: unknown key; nearest is 'loss'"),
            ("clip_low: -1", "{path}: clip_low: -1 is not a finite number >= 0"),
            ("preset: grpo", "{path}: names a preset itself; they do not nest"),
            ("", "{path}: empty; at least one key of section algorithm is needed"),
            (None, "{path}: no such file or directory"),
        ],
    )
    def test_faults_name_the_presets_file(self, loading: Loading, tmp_path: Path, text: str | None, said: str) -> None:
        path = tmp_path / "mine.yaml"
        if text is not None:
            path.write_text(text)
        assert faults_of(loading, "run: {name: a}", f"algorithm.preset={path}") == [
            f"algorithm.preset: {said.format(path=path)}"
        ]

    def test_an_unknown_name(self, loading: Loading) -> None:
        (fault,) = faults_of(loading, "run: {name: a}", "algorithm.preset=dpo")
        assert (
            fault
            == f"algorithm.preset: 'dpo' is not one of {', '.join(preset_names('algorithm.preset'))}, nor a path to FILE.yaml"
        )

    def test_a_preset_of_the_wrong_type(self, loading: Loading) -> None:
        assert faults_of(loading, "run: {name: a}", "algorithm.preset=5") == [
            "algorithm.preset: 5 is not a string; put it in quotes"
        ]


def test_caps_are_positive(loading: Loading) -> None:
    text = "run: {name: a}\nalgorithm: {behaviour_weight_cap: 0, correction_cap: -1, sapo_tau_negative: 0}"
    assert faults_of(loading, text) == [
        "algorithm.behaviour_weight_cap: 0 is not a finite number > 0",
        "algorithm.correction_cap: -1 is not a finite number > 0",
        "algorithm.sapo_tau_negative: 0 is not a finite number > 0",
    ]


def test_a_tracker_without_its_package(sound: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = msgspec.convert(sound | {"trackers": [{"name": "jsonl"}, {"name": "wandb"}]}, Config)
    assert semantic_faults(config, available_bytes=1 << 40) == [
        "trackers.1.name: wandb needs a package: pip install 'sluice-rl[wandb]'"
    ]


def test_nothing_here_imports_torch_or_matplotlib() -> None:
    modules = (
        "runtime.config_loading, runtime.config_checks, runtime.metrics, runtime.trackers, runtime.event_file, runtime.summary"
    )
    code = f"import sys, {modules}; sys.exit(bool({{'torch', 'transformers', 'matplotlib'}} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
