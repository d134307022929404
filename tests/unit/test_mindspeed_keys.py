"""The table of MindSpeed-RL's keys against what MindSpeed-RL declares, against our schema, and against the guide."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec import inspect

from launcher.commands import options
from launcher.importing import guide
from launcher.importing.keys import TheirKey
from launcher.mindspeed.keys import TABLE, named_there
from launcher.mindspeed.layout import ASCEND
from launcher.mindspeed.reading import read
from runtime.config import Config, loading
from runtime.process.command_line import CommandParser
from tests.unit.mindspeed_cases import paths

HERE = Path(__file__).parent
GUIDE = HERE.parents[1] / "docs" / "guides" / "mindspeed-rl.md"
# Names and defaults of its configuration classes, of April 2026; "?" is a default that follows from another.
DECLARED: dict[str, dict[str, Any]] = json.loads((HERE / "mindspeed" / "declared.json").read_text(encoding="utf-8"))
KEYS = [(section, name, key) for section, keys in TABLE.sections.items() for name, key in keys.items()]


def declared(section: str) -> list[tuple[str, Any]]:
    """Keys of a section, those within mappings with dots, and their defaults."""
    return [
        (f"{name}.{inner}" if inner else name, value)
        for name, default in DECLARED[section].items()
        for inner, value in (default.items() if isinstance(default, dict) else [("", default)])
    ]


OURS = set(paths(inspect.type_info(Config)))


@pytest.mark.parametrize("section", DECLARED)
def test_every_key_that_it_declares_is_there_with_its_default(section: str) -> None:
    for name, default in declared(section):
        inner = [other for other in TABLE.sections[section] if other.startswith(f"{name}.")]
        assert name in TABLE.sections[section] or inner, name
        key = TABLE.sections[section].get(name)
        if key is not None and default != "?" and (key.to or key.refused):
            assert key.default == default, name
            assert isinstance(key.default, bool) is isinstance(default, bool), name


def test_keys_within_mappings_are_compared_too() -> None:
    assert (
        dict(declared("generate_config"))["sampling_config.top_k"]
        == TABLE.sections["generate_config"]["sampling_config.top_k"].default
    )
    assert ("actor_resource.num_npus", None) in declared("rl_config")


def test_what_says_what_is_trained() -> None:
    assert {"stage", "is_pairwise_dataset", "mm_model", "skip_train"} <= TABLE.essential
    assert not {"top_p", "top_k", "multi_turn_enable", "adv_estimator", "use_integrated_worker"} & TABLE.essential


def test_a_key_has_one_outcome_and_a_reason() -> None:
    for section, name, key in KEYS:
        told = f"{section}.{name}"
        assert [bool(key.to), bool(key.ignored), bool(key.refused)].count(True) == 1, told
        assert set(key.to) <= OURS, told
        assert "-" not in name
        if key.to:
            assert key.type or key.default is not None, f"{told}: its type has to be known"
            assert key.fault(b"x") != "", told
            assert key.fault(key.default) == "", told
        if key.refused:
            assert key.asks_for_nothing(key.default), told
            assert not key.asks_for_nothing("something else"), told


@pytest.mark.parametrize(
    ("key", "value", "good"),
    [
        (TheirKey(default=1, to=["a"]), 2.0, True),
        (TheirKey(default=1, to=["a"]), 2.5, False),
        (TheirKey(default=1, to=["a"]), True, False),
        (TheirKey(default=1.0, to=["a"]), 2, True),
        (TheirKey(default=1.0, to=["a"]), float("inf"), False),
        (TheirKey(default=False, to=["a"]), 0, False),
        (TheirKey(type="str|list", to=["a"]), [1], True),
        (TheirKey(type="str|list", to=["a"]), 1, False),
        (TheirKey(type="int", to=["a"]), None, True),
    ],
)
def test_types(key: TheirKey, value: object, good: bool) -> None:
    assert (key.fault(value) == "") is good


@pytest.mark.parametrize(
    ("inert", "value", "off"), [(0.0, 0, True), (False, 0, False), (-1, -1, True), (-1, 50, False), (1.0, None, True)]
)
def test_what_asks_for_nothing(inert: Any, value: Any, off: bool) -> None:
    assert TheirKey(default=inert, refused="no").asks_for_nothing(value) is off


def test_keys_are_looked_up_by_section() -> None:
    assert named_there("sampling.group_size") == ["rl_config.n_samples_per_prompt"]
    assert [place for place, _ in filter(None, [TABLE.find("critic_config", "lr"), TABLE.find("actor_config", "lr")])] == [
        "critic_config",
        "megatron_training",
    ]
    assert TABLE.find("rl_config", "lr") is None


def test_every_key_of_the_example_files_is_in_the_table() -> None:
    for file in sorted((HERE / "mindspeed").glob("*.yaml")):
        for entry in read(file).entries:
            assert TABLE.find(entry.section, entry.name) is not None, entry.path


def test_the_guide_has_the_table() -> None:
    page = GUIDE.read_text(encoding="utf-8")
    assert page == guide.renewed(page), f"run python -m launcher.importing.guide {GUIDE.name}"


def test_the_environment_is_there() -> None:
    assert (HERE.parents[1] / "configs" / "envs" / f"{ASCEND}.yaml").is_file()


def test_the_configuration_in_the_guide_is_of_the_schema() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        assert loading.type_faults(yaml.safe_load(block)) == []


def test_every_option_of_the_command_is_in_the_guide() -> None:
    table_of_options = GUIDE.read_text(encoding="utf-8").partition("| option |")[2].partition("\n\n")[0]
    parser = CommandParser()
    options.add_import(parser, *options.IMPORTS["mindspeed"][1:])
    for action in parser._actions:
        name = action.option_strings[-1] if action.option_strings else action.dest.upper()
        assert f"`{name}" in table_of_options or name == "--help", name


def test_the_run_on_gsm8k_in_the_guide_has_the_rewards_of_its_preset() -> None:
    (block,) = (
        each for each in re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL) if "gsm8k" in each
    )
    shown = yaml.safe_load(block)
    preset = yaml.safe_load((HERE.parents[1] / "configs" / "gsm8k_qwen25_1_5b.yaml").read_text(encoding="utf-8"))
    assert shown["rewards"]["rules"] == preset["rewards"]["rules"]
    assert shown["data"]["prompt_type"] == preset["data"]["prompt_type"]
