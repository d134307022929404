"""The reference of the configuration: it is what the schema says, says something of every key, and every key has a reader."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from launcher import config_reference
from launcher.config_reference import purpose, schema
from launcher.mindspeed.keys import TABLE
from runtime import run_files
from runtime.config import UNIT, Config
from tests.unit.source_tree import ROOT

PAGE = ROOT / "docs" / "configuration-reference.md"
KEYS = [key for part in config_reference.parts() for key in part.keys]
PATHS = {key.path for key in KEYS}
SECTIONS = {part.path for part in config_reference.parts()}


def test_the_page_is_what_the_schema_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == config_reference.page(), f"run `{config_reference.COMMAND}`"


def leaves(value: Any, path: str = "") -> Iterator[str]:
    """The dotted paths of whatever is no mapping with keys, of a configuration as plain data."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from leaves(inner, f"{path}.{name}" if path else name)
    else:
        yield path


def test_every_key_of_a_configuration_is_there_once() -> None:
    whole = {"run": {"name": "a"}, "warmup": {}, "critic": {}, "lora": {}, "data": {"curriculum": {}}}
    config = msgspec.convert(whole | {"rewards": {"model": {"path": "m"}}}, Config)
    assert set(leaves(msgspec.to_builtins(config))) - {"trackers"} <= PATHS
    assert len(PATHS) == len(KEYS) > 300
    assert {f"rewards.rules[].{name}" for name in ("name", "weight", "correct", "wrong")} <= PATHS
    assert {"data.train[].weight", "cluster.nodes[].supernode", "trackers[].mode", "evaluation.sets[].k"} <= PATHS
    assert {"services.environment.NAME.run", "services.environment.NAME.budgets.call"} <= PATHS
    assert not any("rollout[]" in path for path in PATHS)  # a list of fleets has the keys of one


def test_every_key_has_a_meaning() -> None:
    def is_told(key: config_reference.ReferenceKey) -> bool:
        begins = key.meaning[:1]
        return bool(key.type) and key.meaning.endswith(".") and (not begins.islower() or begins in "ηβλ")

    assert [key.path for key in KEYS if not is_told(key)] == []


def test_every_section_has_a_purpose() -> None:
    for part in config_reference.parts():
        assert part.purpose.endswith((".", ".)")), part.path
    assert purpose(Config).startswith("A run's configuration.")


def test_what_a_meaning_names_exists() -> None:
    """A dotted path that begins with a section is a key or a section, so that none outlives a change of its name."""
    top = {section.partition(".")[0].removesuffix("[]") for section in SECTIONS if section}
    plain = {path.replace("[]", "") for path in PATHS | SECTIONS} | {run_files.METRICS}
    named = [(key.path, said) for key in KEYS for said in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?=[`:=])", key.meaning)]
    assert [(path, said) for path, said in named if said.partition(".")[0] in top and said not in plain] == []
    assert named


def test_what_mindspeed_rl_s_keys_decide_exists() -> None:
    ours = {path for keys in TABLE.sections.values() for key in keys.values() for path in key.to}
    assert sorted(ours - PATHS) == []
    (row,) = [line for line in config_reference.page().splitlines() if line.startswith("| `sampling.group_size` |")]
    assert "`rl_config.n_samples_per_prompt`" in row


def test_units_are_those_of_the_names() -> None:
    units = {key.path: key.unit for key in KEYS}
    told = {"_bytes": "bytes", "_seconds": "seconds", "_timeout": "seconds", "timeout": "seconds", "_steps": "steps"}
    told |= {"_tokens": "tokens", "hours": "hours"}
    for path, unit in units.items():
        for ending, expected in told.items():
            assert not path.endswith(ending) or unit == expected, path
    assert {unit for path, unit in units.items() if path.startswith("deadlines.")} == {"seconds"}
    assert (units["training.groups_per_step"], units["training.staleness"]) == ("prompts", "versions")
    assert units["evaluation.sets[].problems"] == "problems"  # through `or null`
    assert units["services.trainer.parallel.layers_per_stage"] == "layers"  # through a list


def test_the_schema_describes_every_key_with_its_unit() -> None:
    found = schema()
    assert json.loads(json.dumps(found))["$ref"] == "#/$defs/Config"
    definitions = found["$defs"]
    assert definitions["Run"]["additionalProperties"] is False
    staleness = definitions["Training"]["properties"]["staleness"]
    assert (staleness["minimum"], staleness["default"], staleness[UNIT]) == (0, 2, "versions")
    assert staleness["description"].startswith("η: the most versions")
    assert definitions["Training"]["description"].startswith("The steps of a run.")
    timeout = definitions["Rewards"]["properties"]["timeout"]
    assert (timeout[UNIT], timeout["exclusiveMinimum"]) == ("seconds", 0)
    assert timeout["description"] == "By the clock, after which a rule is killed on one sample."
    silent = [
        f"{name}.{field}"
        for name, definition in definitions.items()
        for field, said in definition["properties"].items()
        if '"$ref"' not in json.dumps(said) and not said.get("description")
    ]
    assert silent == []
