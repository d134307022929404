"""Environments that cannot be, or that nobody's rows can name, are refused before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from runtime.cluster.topology import instances, path_of, players, settings_of
from runtime.config import Config
from runtime.config.checks import semantic_faults
from runtime.config.environment_checks import environment_faults
from runtime.config.loading import resolve
from tests.unit.config_cases import Loading, faults_of

KEY = "services.environment.game"
OTHER: dict[str, Any] = {"server": {"address": "127.0.0.1:5000"}}


@pytest.fixture
def agent(tmp_path: Path) -> str:
    (tmp_path / "agent.py").write_text("def run(data, **_): return 1.0\n")
    return f"{tmp_path / 'agent.py'}:run"


def config_of(environment: dict[str, Any], **sections: Any) -> Config:
    return msgspec.convert({"run": {"name": "a"}, "services": {"environment": environment}, **sections}, Config)


def faults(environment: dict[str, Any], **sections: Any) -> list[str]:
    return list(environment_faults(config_of(environment, **sections)))


def test_one_environment_needs_to_be_named_by_nobody(agent: str) -> None:
    assert faults({"game": {"run": agent, "python": "python3"}}, data={"train": "a.jsonl"}) == []
    assert resolve(config_of({"game": {"run": agent}})).data.environment == "game"
    assert resolve(config_of({"game": {"run": agent}, "shop": OTHER})).data.environment == ""
    assert resolve(config_of({})).data.environment == ""


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({}, f"{KEY}: must have either run or server"),
        ({"run": "a.py:b", **OTHER}, f"{KEY}: must have either run or server"),
        ({"run": "agent.py"}, f"{KEY}.run: 'agent.py' is not of the form FILE.py:NAME"),
        ({"run": "agent:run"}, f"{KEY}.run: 'agent:run' is not of the form FILE.py:NAME"),
        ({"run": "agent.py:"}, f"{KEY}.run: 'agent.py:' is not of the form FILE.py:NAME"),
        ({"run": "nowhere.py:run"}, f"{KEY}.run: 'nowhere.py' is not a file"),
        ({"server": {"address": "here"}}, f"{KEY}.server.address: 'here' is not HOST:PORT, with a port from 1 to 65535"),
        ({"server": {"address": "h:65536"}}, f"{KEY}.server.address: 'h:65536' is not HOST:PORT, with a port from 1 to 65535"),
        ({"replicas": 2, **OTHER}, f"{KEY}.replicas: is of processes that the run starts; must be left out with server"),
        ({"env": {"A": "1"}, **OTHER}, f"{KEY}.env: is of processes that the run starts; must be left out with server"),
        ({"sandbox": {"runtime": "docker"}}, f"{KEY}.sandbox.image: empty; runtime 'docker' needs an image that has python3"),
    ],
)
def test_what_cannot_be_is_refused(agent: str, settings: dict[str, Any], fault: str) -> None:
    usable = {} if not settings or "run" in settings or "server" in settings else {"run": agent}
    assert faults({"game": usable | settings}) == [fault]


def test_names_are_words(agent: str) -> None:
    assert faults({"two-turns_2": {"run": agent}}) == []
    told = "services.environment.a b: a name must consist of letters, digits, _ and -"
    assert faults({"a b": {"run": agent}}) == [told]


@pytest.mark.parametrize(
    ("server", "fault"),
    [
        ({"address": "10.0.0.1:1"}, "what goes there is not encrypted; set"),
        ({"address": "10.0.0.1:1", "plaintext": True}, ""),
        ({"address": "10.0.0.1:1", "plaintext": True, "token": {"from": "T"}}, "server.token: would be sent to '10.0.0.1:1'"),
        ({"address": "[::1]:1", "token": {"from": "T"}}, ""),
        ({"address": "10.0.0.1:1", "ca": "no.pem"}, "server.ca: 'no.pem' is not a file"),
        ({"address": "10.0.0.1:1", "ca": "system"}, ""),
    ],
)
def test_a_server_that_others_may_listen_in_to_has_tls(server: dict[str, Any], fault: str) -> None:
    found = faults({"game": {"server": server}})
    assert len(found) == bool(fault) and all(fault in each for each in found)


def test_of_several_each_place_names_one_that_there_is(agent: str) -> None:
    both = {"game": {"run": agent}, "shop": OTHER}
    (missing,) = faults(both, data={"train": "a.jsonl"})
    assert missing == "data.environment: missing; must be one of services.environment: game, shop"
    assert faults(both, data={"train": "a.jsonl", "environment": "shop"}) == []
    assert faults(both, data={"train": "a.jsonl", "environment_key": "who"}) == []
    named = [{"path": "a", "environment": "game"}, {"path": "b", "environment_key": "who"}]
    assert faults(both, data={"train": named}) == []
    assert faults(both, data={"train": [*named, {"path": "c"}]}) == [missing]
    wrong = faults(
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
    (fault,) = faults({}, data={"environment": "game"})
    assert fault == "data.environment: 'game' is not one of services.environment: there is none"


def test_agents_have_a_gateway_without_its_section(loading: Loading, agent: str) -> None:
    assert loading("run: {name: a}", f"services.environment.game.run={agent}").gateway is not None
    assert loading("run: {name: a}").gateway is None


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
