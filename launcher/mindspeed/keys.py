"""What becomes of each key of MindSpeed-RL's configuration: the table in `keys.yaml`, typed.

The table says which keys of ours a key of theirs decides; how values are translated is code (`translate.py`). Names have
underscores; theirs may have dashes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

FILE = Path(__file__).parent / "keys.yaml"

Outcome = Literal["mapped", "ignored", "refused", "left out"]

ROLES = ("actor", "reference", "reward", "critic")
# By format: the section with the keys of all roles, then each role's own; later ones stand over earlier ones.
SECTIONS: dict[str, dict[str, tuple[str, str]]] = {
    "current": {
        "actor": ("megatron_training", "actor_config"),
        "reference": ("megatron_training", "ref_config"),
        "reward": ("megatron_training", "reward_config"),
        "critic": ("megatron_training", "critic_config"),
    },
    "r1_zero": {
        "actor": ("training", "actor_rollout_ref.actor_rollout"),
        "reference": ("training", "actor_rollout_ref.ref"),
        "reward": ("training", "reward"),
        "critic": ("training", "critic"),
    },
}
# Where the keys of a section of a file are looked up in the table, one after the other; others in their own section alone.
_LOOKED_UP = {
    "model": ("megatron_training",),
    "training": ("megatron_training",),
    "actor_config": ("actor_config", "megatron_training"),
    "ref_config": ("ref_config", "megatron_training"),
    "reward_config": ("reward_config", "megatron_training"),
    "critic_config": ("critic_config", "megatron_training"),
    "vit_config": ("megatron_training",),
    "actor_rollout_ref.actor_rollout": ("actor_rollout_ref.actor_rollout", "megatron_training"),
    "actor_rollout_ref.ref": ("actor_rollout_ref.ref", "ref_config", "megatron_training"),
    "critic": ("critic", "critic_config", "megatron_training"),
    "reward": ("reward", "reward_config", "megatron_training"),
}
# Sections of the older format, some of which are called as ours are.
_OLDER = ("actor_rollout_ref.actor_rollout", "actor_rollout_ref.ref", "critic", "reward", "algorithm", "resource_pool")
_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "list": (list,),
    "map": (dict,),
}
_WORDS = {
    "str": "text",
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "list": "a list",
    "map": "a mapping",
}


class MindSpeedKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Exactly one of `to`, `ignored` and `refused` is given."""

    default: Any = None  # MindSpeed-RL's own
    type: str = ""  # str, bool, int, float, list, map or several with "|"; that of the default when empty
    to: list[str] = []  # mapped: our keys, by their paths, that it decides alone or together with others
    note: str = ""  # how, where that is not obvious; with its unit
    ignored: str = ""  # why it has no counterpart, and needs none
    refused: str = ""  # why a value other than `default` cannot be had here, and what to do instead
    inert: list[Any] = []  # values besides the default that ask for nothing
    essential: bool = False  # says what is trained, the model's structure or the kind of training: cannot be left out

    @property
    def outcome(self) -> Outcome:
        return "mapped" if self.to else "refused" if self.refused else "ignored"

    def fault(self, value: Any) -> str:
        """Why `value` is of a wrong type; "" when it is not. null is every key's."""
        kinds = (self.type or _type_of(self.default)).split("|")
        if value is None or any(_is(value, kind) for kind in kinds if kind) or kinds == [""]:
            return ""
        return f"{shown(value)} is not {' or '.join(_WORDS[kind] for kind in kinds)}"

    def asks_for_nothing(self, value: Any) -> bool:
        inert = (self.default, *self.inert)
        return value is None or any(isinstance(value, bool) is isinstance(one, bool) and value == one for one in inert)


def shown(value: Any) -> str:
    """A value as in YAML's flow style, on one line; text in quotes only where it would be taken for something else."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, str):
        return value if value and value == value.strip() and value.isprintable() else repr(value)
    text = yaml.safe_dump(value, default_flow_style=True, width=math.inf, sort_keys=False).strip()
    return text.removesuffix("...").strip()


def _type_of(value: Any) -> str:
    for name in ("bool", "int", "float", "str", "list", "map"):
        if isinstance(value, _TYPES[name]):
            return name
    return ""


def _is(value: Any, kind: str) -> bool:
    if kind == "int" and isinstance(value, float):
        return value.is_integer()  # 1.0 counts as 1
    finite = not isinstance(value, float) or math.isfinite(value)
    return isinstance(value, _TYPES[kind]) and finite and (kind == "bool" or not isinstance(value, bool))


@functools.cache
def table() -> dict[str, dict[str, MindSpeedKey]]:
    """By section of their file (`rl_config`), then by key."""
    return msgspec.convert(yaml.safe_load(FILE.read_bytes()), dict[str, dict[str, MindSpeedKey]])


def named_there(path: str) -> list[str]:
    """The keys of MindSpeed-RL's current format, as SECTION.KEY, that decide our key `path`."""
    sections = {section: keys for section, keys in table().items() if section not in _OLDER}
    return [f"{section}.{name}" for section, keys in sections.items() for name, key in keys.items() if path in key.to]


def looked_up(section: str) -> tuple[str, ...]:
    """The sections of the table in which a key of a file's `section` is looked up."""
    return _LOOKED_UP.get(section, (section,))


def find(section: str, name: str) -> tuple[str, MindSpeedKey] | None:
    """A key of a file's `section`, and the section of the table that has it."""
    return next(((place, table()[place][name]) for place in looked_up(section) if name in table().get(place, {})), None)


@functools.cache
def essential() -> frozenset[str]:
    """The names of keys that say what is trained, whatever section they are in."""
    return frozenset(name for keys in table().values() for name, key in keys.items() if key.essential)


def names(section: str) -> Mapping[str, MindSpeedKey]:
    """The keys that a file's `section` may have."""
    found: dict[str, MindSpeedKey] = {}
    for place in reversed(looked_up(section)):
        found |= table().get(place, {})
    return found


def nearest(section: str, name: str) -> str:
    """What was meant by an unknown key: of its own section, or the same one of another; "" where nothing is near."""
    near = get_close_matches(name, list(names(section)), n=1, cutoff=0.6)
    if near:
        return f"nearest is {near[0]}"
    elsewhere = [place for place, keys in table().items() if name in keys]
    return f"{elsewhere[0]} has one" if elsewhere else ""
