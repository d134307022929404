"""What the checks say of `rewards` and of environments: names, addresses, folders, what an evaluation needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from runtime.cluster.topology import instances, path_of, players, settings_of
from runtime.config import Config
from runtime.config.checks import semantic_faults
from runtime.config.environment_checks import environment_faults
from runtime.config.loading import resolve
from tests.unit.config_cases import Loading, cases, faults_of

REMOTE = {"name": "taste", "address": "127.0.0.1:50051"}
RULE = {"name": "gsm8k"}
QUIET = {"before": False, "after": False}
KEY = "services.environment.game"
OTHER: dict[str, Any] = {"server": {"address": "127.0.0.1:5000"}}


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "policy", architectures=["Qwen2ForCausalLM"])


def write_folder(folder: Path, tokenizer: bool = True, **settings: Any) -> Path:
    folder.mkdir()
    shape = {"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 8, "vocab_size": 100, "intermediate_size": 8}
    shape |= {"model_type": "qwen2", **settings}  # type: ignore[dict-item]
    (folder / "config.json").write_text(json.dumps(shape))
    (folder / "model.safetensors").write_bytes(b"")
    if tokenizer:
        (folder / "tokenizer.json").write_text("{}")
    return folder


def make(policy: Path, **sections: Any) -> Config:
    data = policy.parent / "data.jsonl"
    data.write_text("{}\n")
    raw = {"run": {"name": "a"}, "model": {"path": str(policy)}, "data": {"train": str(data)}, **sections}
    return msgspec.convert(raw, Config)


def faults(policy: Path, rewards: dict[str, Any], **sections: Any) -> list[str]:
    return semantic_faults(make(policy, rewards=rewards, **sections), available_bytes=1 << 40)


def classifier(folder: Path, **settings: Any) -> Path:
    labels = {"0": "LABEL_0"}
    return write_folder(folder, **{"architectures": ["Qwen2ForSequenceClassification"], "id2label": labels, **settings})


# ------------------------------------------------------------------------------------------------ remote rewards


def test_addresses(policy: Path) -> None:
    for address in ("127.0.0.1:1", "127.9.9.9:65535", "localhost:50051", "[::1]:50051", "127.0.0.1:00080"):
        assert faults(policy, {"rules": [RULE], "remote": [REMOTE | {"address": address}]}) == []
    none = [":50051", "judge", "judge:", "judge:0", "judge:65536", "judge:http", "http://judge:80", "::1:50051"]
    for address in ("", "a b:1", *none):
        (fault,) = faults(policy, {"rules": [RULE], "remote": [REMOTE | {"address": address}]})
        assert fault == f"rewards.remote.0.address: '{address}' is not HOST:PORT, with a port from 1 to 65535"


@pytest.mark.parametrize("address", ["10.0.0.7:50051", "judge.example:50051", "[fe80::1]:50051", "0.0.0.0:50051"])
def test_another_machine_has_to_be_allowed(policy: Path, address: str) -> None:
    remote = REMOTE | {"address": address}
    (fault,) = faults(policy, {"rules": [RULE], "remote": [REMOTE | {"name": "first"}, remote]})
    assert fault.startswith(f"rewards.remote.1.address: '{address}' is not this machine")
    assert "rewards.remote.1.plaintext" in fault
    assert faults(policy, {"rules": [RULE], "remote": [remote | {"plaintext": True}]}) == []
    assert faults(policy, {"rules": [RULE], "remote": [remote | {"ca": "system"}]}) == []
    both = "true, but there is rewards.remote.0.ca; must be one of the two"
    sent = f"would be sent to '{address}' as plain text; needs rewards.remote.0.ca"
    for more, said in (
        ({"ca": "none.pem"}, "ca: 'none.pem' is not a file; must be one with certificates, or system"),
        ({"ca": "system", "plaintext": True}, f"plaintext: {both}"),
        ({"plaintext": True, "token": {"from": "JUDGE"}}, f"token: {sent}"),
    ):
        assert faults(policy, {"rules": [RULE], "remote": [remote | more]}) == [f"rewards.remote.0.{said}"]


@pytest.mark.parametrize("name", ["taste", "gsm8k", "own", "reward_model", "a/b"])
def test_names_are_not_given_twice_and_are_parts_of_a_metrics(policy: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "mine.py").write_text("")
    model = {"path": str(classifier(tmp_path / "reward"))}
    rules = [RULE, {"name": f"{tmp_path}/mine.py:own"}]
    (fault,) = faults(policy, {"rules": rules, "model": model, "remote": [REMOTE, REMOTE | {"name": name}]})
    assert fault.startswith(f"rewards.remote.1.name: '{name}'" + (" is taken" if name != "a/b" else ""))


def test_a_remote_reward_answers_before_the_coordinator_gives_up(policy: Path) -> None:
    rewards = {"rules": [RULE], "remote": [REMOTE | {"timeout": 20}]}
    (fault,) = faults(policy, rewards, deadlines={"score": 20})
    assert fault == "rewards.remote.0.timeout: 20 is not below deadlines.score 20"


# ------------------------------------------------------------------------------------------------ the reward model


def test_a_reward_model_is_a_classifier_with_one_label(policy: Path, tmp_path: Path) -> None:
    def fault(folder: Path, **settings: Any) -> str:
        (line,) = faults(policy, {"rules": [RULE], "model": {"path": str(folder), **settings}})
        return line

    assert faults(policy, {"rules": [RULE], "model": {"path": str(classifier(tmp_path / "sound"))}}) == []
    assert fault(tmp_path / "none") == f"rewards.model.path: '{tmp_path / 'none'}' is not a folder"
    assert "is not a sequence classifier" in fault(policy)
    assert "has not one label" in fault(classifier(tmp_path / "two", id2label={"0": "a", "1": "b"}))
    unnamed = classifier(tmp_path / "unnamed", id2label=None)
    assert "has not one label" in fault(unnamed)  # transformers' default is two
    limited = classifier(tmp_path / "limited", max_position_embeddings=64)
    assert fault(limited, max_tokens=65) == "rewards.model.max_tokens: 65 is above the model's 64 positions"


def test_a_reward_model_that_reads_tokens_knows_the_policys(policy: Path, tmp_path: Path) -> None:
    def found(folder: Path, **settings: Any) -> list[str]:
        return faults(policy, {"rules": [RULE], "model": {"path": str(folder), **settings}})

    small = classifier(tmp_path / "small", vocab_size=99)
    assert found(small) == []  # it has a tokenizer of its own
    (fault,) = found(small, input="tokens")
    assert "has a vocabulary of 99 tokens, the policy one of 100" in fault
    bare = classifier(tmp_path / "bare", tokenizer=False, vocab_size=99)
    assert len(found(bare)) == 1
    (fault,) = found(classifier(tmp_path / "large", tokenizer=False, vocab_size=128), input="text")
    assert fault.endswith("has no tokenizer.json")


# ------------------------------------------------------------------------------------------------ without rules


@pytest.mark.parametrize("evaluation", [{}, {"before": False}, {"after": False}, {"every": 3, **QUIET}])
def test_an_evaluation_needs_a_rule(policy: Path, tmp_path: Path, evaluation: dict[str, Any]) -> None:
    rewards = {"model": {"path": str(classifier(tmp_path / "reward"))}}
    data = {"train": str(policy / "config.json"), "eval": str(policy / "config.json")}
    (fault,) = faults(policy, rewards, data=data, evaluation=evaluation)
    assert fault.startswith("rewards.rules: empty; an evaluation's accuracy is by the first rule")
    assert faults(policy, rewards | {"rules": [RULE | {"weight": 0}]}, data=data, evaluation=evaluation) == []
    assert faults(policy, rewards, data=data, evaluation=QUIET) == []
    assert faults(policy, rewards, evaluation={"before": True}) == []  # there is nothing to evaluate on


def test_only_the_services_that_give_rewards_are_started(policy: Path) -> None:
    def roles(**rewards: Any) -> list[str]:
        config = make(policy, rewards=rewards, services={"reward_model": {"replicas": 2}})
        return [instance.name for instance in instances(config) if instance.role.startswith("reward")]

    assert roles(rules=[RULE]) == ["reward-0"]
    assert roles(remote=[REMOTE]) == ["reward-0"]
    assert roles(model={"path": "x"}) == ["reward_model-0", "reward_model-1"]
    assert roles(rules=[RULE], model={"path": "x"}) == ["reward-0", "reward_model-0", "reward_model-1"]


# ------------------------------------------------------------------------------------------------ who plays


def test_whoever_plays_may_be_the_only_one_to_give_rewards(policy: Path) -> None:
    none = "rewards.rules: empty; at least one rule, remote or model is needed"
    assert faults(policy, {}, gateway={}) == []
    assert faults(policy, {"environment": 0}, gateway={}) == [none]
    assert faults(policy, {}) == [none]


def test_its_column_is_nobody_else_s(policy: Path) -> None:
    taken = {"rules": [RULE], "remote": [REMOTE | {"name": "environment"}]}
    assert faults(policy, taken) == []
    assert [each.partition(":")[0] for each in faults(policy, taken, gateway={})] == ["rewards.remote.0.name"]
    (policy.parent / "own.py").write_text("")
    (found,) = faults(policy, {"rules": [{"name": f"{policy.parent}/own.py:environment"}]}, gateway={})
    assert found.startswith("rewards.rules: 'environment' is what")


@pytest.mark.parametrize(("advantage", "refused"), [("group_norm", False), ("reinforce_plus_plus", True)])
def test_a_discount_by_turns_is_not_ignored(policy: Path, advantage: str, refused: bool) -> None:
    found = faults(policy, {"rules": [RULE]}, algorithm={"advantage": advantage, "turn_discount": 0.9})
    assert [each.partition(":")[0] for each in found] == ["algorithm.turn_discount"] * refused


def test_a_worker_waits_for_its_sandbox(policy: Path) -> None:
    sandbox = {"timeout": 10.0, "memory": 1 << 30}
    assert faults(policy, {"rules": [RULE], "sandbox": sandbox}) == []
    assert faults(policy, {"rules": [{"name": "code"}]}) == []
    assert faults(policy, {"rules": [{"name": "code"}], "sandbox": sandbox}) == [
        "rewards.sandbox.timeout: 10 is not below rewards.timeout 10",
        f"rewards.sandbox.memory: {1 << 30} is more than rewards.memory_bytes {384 << 20}, which bounds it",
    ]
    assert faults(policy, {"rules": [{"name": "code_share"}], "sandbox": {"network": "gateway"}}) == [
        "rewards.sandbox.network: 'gateway' is for episodes; must be none for the rules code and code_share"
    ]
    assert faults(policy, {"rules": [RULE], "sandbox": {"runtime": "docker"}}) == [
        "rewards.sandbox.image: empty; runtime 'docker' needs an image that has python3"
    ]


# ------------------------------------------------------------------------------------------------ environments


@pytest.fixture
def agent(tmp_path: Path) -> str:
    (tmp_path / "agent.py").write_text("def run(data, **_): return 1.0\n")
    return f"{tmp_path / 'agent.py'}:run"


def config_of(environment: dict[str, Any], **sections: Any) -> Config:
    return msgspec.convert({"run": {"name": "a"}, "services": {"environment": environment}, **sections}, Config)


def refused(environment: dict[str, Any], **sections: Any) -> list[str]:
    return list(environment_faults(config_of(environment, **sections)))


def test_one_environment_needs_to_be_named_by_nobody(loading: Loading, agent: str) -> None:
    assert refused({"game": {"run": agent, "python": "python3"}}, data={"train": "a.jsonl"}) == []
    assert resolve(config_of({"game": {"run": agent}})).data.environment == "game"
    assert resolve(config_of({"game": {"run": agent}, "shop": OTHER})).data.environment == ""
    assert resolve(config_of({})).data.environment == ""
    assert loading("run: {name: a}", f"{KEY}.run={agent}").gateway is not None  # without its section
    assert loading("run: {name: a}").gateway is None


ENVIRONMENTS = """
run: 'a.py:b', server: {address: '127.0.0.1:5000'} => : must have either run or server
run: agent.py => .run: 'agent.py' is not of the form FILE.py:NAME
run: 'agent:run' => .run: 'agent:run' is not of the form FILE.py:NAME
run: 'agent.py:' => .run: 'agent.py:' is not of the form FILE.py:NAME
run: 'nowhere.py:run' => .run: 'nowhere.py' is not a file
server: {address: here} => .server.address: 'here' is not HOST:PORT, with a port from 1 to 65535
replicas: 2, server: {address: '127.0.0.1:1'}
  => .replicas: is of processes that the run starts; must be left out with server
env: {A: '1'}, server: {address: '127.0.0.1:1'}
  => .env: is of processes that the run starts; must be left out with server
sandbox: {runtime: docker} => .sandbox.image: empty; runtime 'docker' needs an image that has python3
server: {address: '10.0.0.1:1'} => .server.address: '10.0.0.1:1' is not this machine
server: {address: '10.0.0.1:1', plaintext: true, token: {from: T}} => .server.token: would be sent to '10.0.0.1:1'
server: {address: '10.0.0.1:1', ca: no.pem} => .server.ca: 'no.pem' is not a file
server: {address: '10.0.0.1:1', plaintext: true} => none
server: {address: '[::1]:1', token: {from: T}} => none
server: {address: '10.0.0.1:1', ca: system} => none
"""


@pytest.mark.parametrize(("settings", "fault"), cases(ENVIRONMENTS))
def test_what_cannot_be_is_refused(agent: str, settings: dict[str, Any], fault: str) -> None:
    usable = {} if "run" in settings or "server" in settings else {"run": agent}
    found = refused({"game": usable | settings})
    assert [each[: len(KEY + fault)] for each in found] == ([] if fault == "none" else [f"{KEY}{fault}"])


def test_names_are_words(agent: str) -> None:
    assert refused({"game": {}}) == [f"{KEY}: must have either run or server"]
    assert refused({"two-turns_2": {"run": agent}}) == []
    told = "services.environment.a b: a name must consist of letters, digits, _ and -"
    assert refused({"a b": {"run": agent}}) == [told]


def test_of_several_each_place_names_one_that_there_is(agent: str) -> None:
    both = {"game": {"run": agent}, "shop": OTHER}
    (missing,) = refused(both, data={"train": "a.jsonl"})
    assert missing == "data.environment: missing; must be one of services.environment: game, shop"
    assert refused(both, data={"train": "a.jsonl", "environment": "shop"}) == []
    assert refused(both, data={"train": "a.jsonl", "environment_key": "who"}) == []
    named = [{"path": "a", "environment": "game"}, {"path": "b", "environment_key": "who"}]
    assert refused(both, data={"train": named}) == []
    assert refused(both, data={"train": [*named, {"path": "c"}]}) == [missing]
    wrong = refused(
        both,
        data={"train": [{"path": "a", "environment": "gmae"}], "environment": "bazaar"},
        evaluation={"sets": [{"name": "s", "path": "b", "environment": "shpo"}]},
    )
    assert [each.partition(" is not one of services.environment: game, shop")[0] for each in wrong] == [
        "data.environment: 'bazaar'",
        "data.train.0.environment: 'gmae'",
        "evaluation.sets.0.environment: 'shpo'",
    ]


def test_rows_cannot_name_an_environment_where_there_is_none() -> None:
    (fault,) = refused({}, data={"environment": "game"})
    assert fault == "data.environment: 'game' is not one of services.environment: there is none"


def test_what_earlier_versions_had_says_what_to_write_now(loading: Loading) -> None:
    (player,) = faults_of(loading, "run: {name: a}\ngateway: {player: {run: a.py}}")
    assert player.startswith("gateway.player: ") and "write services.environment" in player
    (platform,) = faults_of(loading, "run: {name: a}\nservices: {environment: ascend}")
    assert platform.startswith("services.environment: ") and "write services.platform: ascend" in platform


@pytest.mark.parametrize(("python", "how"), [("no/python", ""), (".venv-agents/none", "; run make install-agents")])
def test_an_interpreter_that_is_not_there_is_told_of_once(agent: str, python: str, how: str) -> None:
    found = semantic_faults(config_of({"game": {"run": agent, "python": python}}), trains=True)
    told = [fault for fault in found if fault.startswith(KEY)]
    assert told == [f"{KEY}.python: '{python}' is not an executable{how}"]


def test_processes_are_counted_over_all_environments_but_for_servers_of_ones_own(agent: str) -> None:
    config = config_of({"game": {"run": agent, "replicas": 2}, "shop": OTHER, "maze": {"run": agent}})
    assert players(config) == {"environment-0": KEY, "environment-1": KEY, "environment-2": "services.environment.maze"}
    own = [each for each in instances(config, trains=False) if each.role == "environment"]
    assert [path_of(config, each) for each in own] == [KEY, KEY, "services.environment.maze"]
    assert settings_of(config, own[2]) is config.services.environment["maze"]
