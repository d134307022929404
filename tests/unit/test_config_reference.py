"""The reference of the configuration: it is what the schema says, says something of every key, and every key has a reader."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from launcher import config_reference
from launcher.config_reference import purpose, schema
from launcher.mindspeed.keys import TABLE
from runtime import run_files
from runtime.config import UNIT, Config, loading

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "configuration-reference.md"
KEYS = [key for part in config_reference.parts() for key in part.keys]
PATHS = {key.path for key in KEYS}
SECTIONS = {part.path for part in config_reference.parts()}
FILES = [path for package in ("runtime", "services", "launcher") for path in sorted((ROOT / package).rglob("*.py"))]


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


def test_rows_by_hand() -> None:
    rows = {key.path: key for key in KEYS}
    row = rows["publication.bucket_bytes"]
    assert (row.type, row.default, row.unit) == ("integer ≥ 1", "`16777216` (16 MiB)", "bytes")
    assert rows["training.optimizer.learning_rate"].default == "`1e-6`"
    assert rows["critic.optimizer.learning_rate"].default == "`1e-5`"
    assert rows["training.optimizer.betas"].default == "`[0.9, 0.999]`"
    assert (rows["run.name"].default, rows["run.dir"].default) == ("required", '`""`')
    assert rows["data.train"].type == "string or list of: section"
    assert rows["network.port_range"].type == "list of 2: integer ≥ 0 and ≤ 65535 or null"
    assert rows["trackers"].default == "`[{name: jsonl}, {name: tensorboard}]`"
    assert rows["services.rollout"].default == "`{}`"


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


def test_who_loads_a_configuration_reads_no_source() -> None:
    code = "import sys, services.coordinator; sys.exit('launcher.config_reference' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False).returncode == 0


def reads(tree: ast.AST) -> Iterator[str]:
    """The names of attributes that are read, by a dot or by `getattr`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            yield from (str(argument.value) for argument in node.args[1:2] if isinstance(argument, ast.Constant))


def read_names() -> set[str]:
    """By whom has no part in it; of the schema's own files only what their functions read counts."""
    found: set[str] = set()
    for path in FILES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        inside = path.is_relative_to(ROOT / "runtime" / "config")
        parts = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)] if inside else [tree]
        found.update(name for part in parts for name in reads(part))
    return found


def test_every_key_is_read_somewhere() -> None:
    names = read_names()
    filled = set(loading._PRESETS)  # these are read before there is a Config
    # Of references, which `runtime.config.secret_values` reads as plain values.
    filled |= {path for path in PATHS if path.endswith(".token.from")}
    assert sorted(key.path for key in KEYS if key.path.rpartition(".")[2] not in names and key.path not in filled) == []


def test_a_key_that_is_only_written_would_be_found() -> None:
    tree = ast.parse("config.a = 1\nreplace(config, b=2)\nf(config.c.d, getattr(config, 'e'))")
    assert sorted(reads(tree)) == ["c", "d", "e"]
