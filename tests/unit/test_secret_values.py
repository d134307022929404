"""A secret is named in a configuration and is not in it: what is refused, what is shown, and where its value comes from."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest

from launcher.node.environment import environment, faults
from launcher.node.machine import Machine
from runtime import run_files
from runtime.config import Config, FromEnvironment, Rollout
from runtime.config.secret_values import NOT_SHOWN, references, resolved, without_secrets
from runtime.errors import UserError
from tests.unit.config_cases import Loading, faults_of

VALUE = "s3cr3t-value"
RUN = "run: {name: a}\n"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("env.WANDB_API_KEY", VALUE),
        ("env.hf-token", VALUE),
        ("env.DB_PASSWD", VALUE),
        ("env.HTTPS_PROXY", f"http://user:{VALUE}@proxy:8080"),
        ("env.A_SECRET", 12345678),  # no string, and not shown as the fault that this is
        ("engine_args.hf_token", VALUE),
        ("engine_args.kv.apiKey", VALUE),
        ("engine_args.kv.password.of", VALUE),
        ("engine_args.kv.urls.0", f"redis://:{VALUE}@host/0"),
    ],
)
@pytest.mark.parametrize("from_file", [True, False], ids=["file", "override"])
def test_a_secrets_value_is_refused_and_not_shown(loading: Loading, key: str, value: Any, from_file: bool) -> None:
    section, *names = key.split(".")
    given: Any = value
    for name in reversed(names):
        given = [given] if name == "0" else {name: given}
    if from_file:
        found = faults_of(loading, json.dumps({"run": {"name": "a"}, "services": {"rollout": [{section: given}]}}))
    else:
        found = faults_of(loading, RUN + "services: {rollout: [{}]}", f"services.rollout.0.{section}={json.dumps(given)}")
    said = (
        "a secret, whose value must not stand in the configuration; must be {from: NAME}, the environment variable that has it"
    )
    assert found == [f"services.rollout.0.{key}: {said}"]


def test_an_override_that_cannot_be_read_shows_no_value(loading: Loading) -> None:
    (fault,) = faults_of(loading, RUN, f"services.trainer.env.HF_TOKEN=[{VALUE}")
    assert fault == "override 'services.trainer.env.HF_TOKEN': the value is not valid YAML"


def test_a_secret_in_a_file_of_variables_is_refused(loading: Loading, tmp_path: Path) -> None:
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
    config = loading(
        RUN, "services.rollout.env.HF_TOKEN={from: MY_TOKEN}", "services.rollout.engine_args.hf_token={from: HF_TOKEN}"
    )
    assert isinstance(config.services.rollout, Rollout)
    assert config.services.rollout.env == {"HF_TOKEN": FromEnvironment(variable="MY_TOKEN")}
    assert config.services.rollout.engine_args == {"hf_token": {"from": "HF_TOKEN"}}
    assert loading(json.dumps(msgspec.to_builtins(config))) == config


def test_a_reference_with_another_key_is_refused(loading: Loading) -> None:
    assert faults_of(loading, RUN, "services.trainer.env.A={form: B}") == [
        "services.trainer.env.A.form: unknown key; nearest is 'from'",
        "services.trainer.env.A.from: missing; needs a string",
    ]


def given(**roles: Any) -> Config:
    return msgspec.convert({"run": {"name": "a"}, "services": roles}, Config)


def test_who_sees_a_configuration_sees_no_value_that_may_be_a_secret() -> None:
    """Also where one is there: earlier versions took it."""
    arguments = {"hf_token": VALUE, "block_size": 16, "kv": [{"url": f"redis://me:{VALUE}@host"}], "key": {"from": "KEY"}}
    config = given(rollout=[{"engine_args": arguments}], trainer={"env": {"UNKNOWN": VALUE, "HF_TOKEN": {"from": "MINE"}}})
    shown = without_secrets(config)
    assert VALUE not in json.dumps(shown)
    assert shown["services"]["trainer"]["env"] == {"UNKNOWN": NOT_SHOWN, "HF_TOKEN": {"from": "MINE"}}
    hidden = {"hf_token": NOT_SHOWN, "block_size": 16, "kv": [{"url": NOT_SHOWN}], "key": {"from": "KEY"}}
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
    role = given(
        rollout={"env": {"X": {"from": "Y"}}, "engine_args": {"a": {"from": "X"}, "b": {"from": "Z"}}}
    ).services.rollout
    assert isinstance(role, Rollout)
    assert references(role, "services.rollout") == {"services.rollout.env.X": "Y", "services.rollout.engine_args.b": "Z"}


def test_a_variable_that_this_machine_has_not_is_a_fault_before_anything_starts() -> None:
    roles: dict[str, Any] = {"trainer": {"env": {"HF_TOKEN": {"from": "MINE"}}}}
    said = "services.trainer.env.HF_TOKEN: {from: MINE}: this machine's environment has no MINE"
    assert list(faults(given(**roles), Machine())) == [said]
    assert list(faults(given(**roles), Machine(variables=frozenset({"MINE"})))) == []
    # With other nodes the role may be on one of them, which is asked when the process is started.
    assert list(faults(given(**roles, coordinator={"host": "10.0.0.1"}), Machine())) == []


def test_a_preloaded_library_that_is_a_reference_stays_one() -> None:
    role = given(trainer={"jemalloc": "/lib/j.so", "env": {"LD_PRELOAD": {"from": "MINE"}}}).services.trainer
    assert environment(role, 1, Machine())["LD_PRELOAD"] == FromEnvironment(variable="MINE")


def test_a_private_file_is_its_owners_alone_also_where_another_was(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("old")
    path.chmod(0o666)
    (tmp_path / "config.yaml.partial").write_text("of one that was killed")
    run_files.write_private(path, "ü")
    assert path.read_text(encoding="utf-8") == "ü"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]
