"""What becomes of each key of another program's configuration: a table in a `keys.yaml`, typed.

The table says which keys of ours a key of theirs decides; how values are translated that are not the same here is code.
Names have underscores; theirs may have dashes.
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

Outcome = Literal["mapped", "ignored", "to decide", "refused", "left out"]

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


class TheirKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Exactly one of `to`, `decide`, `ignored` and `refused` is given."""

    default: Any = None  # the other program's own
    type: str = ""  # str, bool, int, float, list, map or several with "|"; that of the default when empty
    to: list[str] = []  # mapped: our keys, by their paths, that it decides alone or together with others
    note: str = ""  # how, where that is not obvious; with its unit
    copy: bool = False  # mapped: all of `to` become its value as it is
    least: int | None = None  # of `copy`: values below it are this one
    values: dict[str, Any] = {}  # mapped: ours, by theirs as they are shown; others are refused
    when: dict[str, Any] = {}  # of `copy` and `values`: by facts of a translation, when they hold; else it is ignored
    otherwise: str = ""  # for this reason
    decide: str = ""  # what the user has to do about a value other than `default`
    ignored: str = ""  # why it has no counterpart, and needs none
    refused: str = ""  # why a value other than `default` cannot be had here, and what to do instead
    inert: list[Any] = []  # values besides the default that ask for nothing
    essential: bool = False  # says what is trained, the model's structure or the kind of training: cannot be left out

    @property
    def outcome(self) -> Outcome:
        return "mapped" if self.to else "refused" if self.refused else "to decide" if self.decide else "ignored"

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


class KeyTable:
    """The keys of one program's files, by section (`rl_config`), then by name; `mtp.*` stands for all names that begin so.

    `program` is its name, `command` ours that imports its files. `places`: where the keys of a section of a file are
    looked up in the table, one after the other; others in their own section alone.
    """

    def __init__(self, program: str, command: str, file: Path, places: Mapping[str, tuple[str, ...]] | None = None):
        self.program = program
        self.command = command
        self._file = file
        self._places = places or {}

    @functools.cached_property
    def sections(self) -> dict[str, dict[str, TheirKey]]:
        return msgspec.convert(yaml.safe_load(self._file.read_bytes()), dict[str, dict[str, TheirKey]])

    @functools.cached_property
    def essential(self) -> frozenset[str]:
        """The names of keys that say what is trained, whatever section they are in."""
        return frozenset(name for keys in self.sections.values() for name, key in keys.items() if key.essential)

    def looked_up(self, section: str) -> tuple[str, ...]:
        """The sections of the table in which a key of a file's `section` is looked up."""
        return self._places.get(section, (section,))

    def find(self, section: str, name: str) -> tuple[str, TheirKey] | None:
        """A key of a file's `section`, and the section of the table that has it."""
        parts = name.split(".")
        patterns = [name, f"{name}.*", *(".".join([*parts[:end], "*"]) for end in range(len(parts) - 1, -1, -1))]
        known = ((place, self.sections.get(place, {}), pattern) for place in self.looked_up(section) for pattern in patterns)
        return next(((place, keys[pattern]) for place, keys, pattern in known if pattern in keys), None)

    def place(self, path: str) -> tuple[str, str]:
        """The section of a path, the longest one that the table has, and the name in it."""
        sections = [section for section in self.sections if section and path.startswith(f"{section}.")]
        section = max(sections, key=len, default="")
        return section, path.removeprefix(f"{section}.")

    def names(self, section: str) -> Mapping[str, TheirKey]:
        """The keys that a file's `section` may have."""
        found: dict[str, TheirKey] = {}
        for place in reversed(self.looked_up(section)):
            found |= self.sections.get(place, {})
        return found

    def nearest(self, section: str, name: str) -> str:
        """What was meant by an unknown key: of its own section, or the same one of another; "" where nothing is near."""
        near = get_close_matches(name, list(self.names(section)), n=1, cutoff=0.6)
        if near:
            return f"nearest is {near[0]}"
        elsewhere = [place for place, keys in self.sections.items() if name in keys]
        return f"{elsewhere[0] or 'the top level'} has one" if elsewhere else ""
