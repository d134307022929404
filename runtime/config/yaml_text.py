"""YAML as the configuration's files have it: text to plain values, and back.

Scalars follow YAML 1.2's core schema: `1e-5` is a number, `on`, `no` and `2026-01-01` are strings. Keys may not occur twice."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from runtime.errors import ConfigError, UserError
from runtime.run_files import reading, regular

MOST_BYTES = 1 << 20  # of a file
MOST_VALUES = 100_000  # of it, those that aliases repeat each time
DEEPEST = 100  # of values within values
_SHOWN_CHARACTERS = 60

_BOOLEANS = {"on", "off", "yes", "no", "y", "n"}  # of YAML 1.1
_MERGE = "tag:yaml.org,2002:merge"
_CORE_SCHEMA = (
    (_MERGE, r"<<", ["<"]),
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("tag:yaml.org,2002:int", r"[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("tag:yaml.org,2002:float", r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?", list("-+.0123456789")),
)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str | None, list[Any]] = {}

    def __init__(self, stream: str | bytes):
        super().__init__(stream)
        self._count = self._depth = 0
        self._counts: dict[yaml.Node, int] = {}  # how many values each node is, itself among them

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Counted before anything is made: a few bytes of aliases of aliases are gigabytes of values."""
        mark, before = self.peek_event().start_mark, self._count
        if self._depth >= DEEPEST:
            raise yaml.composer.ComposerError(None, None, f"more than {DEEPEST} values within each other", mark)
        self._depth += 1
        node: Any = super().compose_node(parent, index)
        self._depth -= 1
        self._count += self._counts.get(node, 1)
        self._counts.setdefault(node, self._count - before)
        if self._count > MOST_VALUES:
            raise yaml.composer.ComposerError(None, None, f"more than {MOST_VALUES} values, with what aliases repeat", mark)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:  # PyYAML's, for `!!int x`
            fault = f"{show(str(node.value))} is not of the type {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(None, None, fault, node.start_mark) from error

    def compose_mapping_node(self, anchor: dict[Any, Any]) -> yaml.MappingNode:
        # Checked here and not in construct_mapping, where merged keys legitimately repeat those they are merged into.
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
                if key.value in seen:
                    raise yaml.composer.ComposerError(None, None, f"key '{key.value}' occurs twice", key.start_mark)
                seen.add(key.value)
        return node


class _Dumper(yaml.SafeDumper):
    """Quotes what `_Loader`, or a reader of YAML 1.1, would not read back as a string."""

    yaml_implicit_resolvers: dict[str | None, list[Any]] = {}

    def ignore_aliases(self, data: object) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        # Unquoted, some separators (U+0085) would be read back as spaces.
        plain = data.isprintable() and data.lower() not in _BOOLEANS
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=None if plain else '"')


_Dumper.add_representer(str, _Dumper.represent_str)
for _tag, _pattern, _first in _CORE_SCHEMA:
    _Loader.add_implicit_resolver(_tag, re.compile(f"(?:{_pattern})$"), _first)
    _Dumper.add_implicit_resolver(_tag, re.compile(f"(?:{_pattern})$"), _first)


class _TextLoader(_Loader):
    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        return node.value if isinstance(node, yaml.ScalarNode) else super().construct_object(node, deep)


def read_texts(text: str) -> Any:
    """Return the value with all scalars as texts, so that a run may be called `on`. Raises yaml.YAMLError if not valid."""
    return read_value(text, _TextLoader)


class _TextDumper(_Dumper):
    yaml_implicit_resolvers: dict[str | None, list[Any]] = {}


def write_texts(raw: Any) -> str:
    """Return a value of `read_texts` as YAML for readers: numbers have no quotes."""
    return str(yaml.dump(raw, Dumper=_TextDumper, sort_keys=False, allow_unicode=True, width=120))


def read_value(text: str | bytes, loader: type[_Loader] = _Loader) -> Any:
    """Return the value of a YAML text. Raises yaml.YAMLError if it is not valid."""
    if len(text) > MOST_BYTES:
        raise yaml.YAMLError(f"{len(text)} bytes; must be at most {MOST_BYTES}")
    try:
        # Aliased nodes are one object; copied, an override of one place does not show in another.
        return msgspec.to_builtins(yaml.load(text, Loader=loader))
    except RecursionError as error:
        raise yaml.YAMLError("nested too deeply, or an alias that contains itself") from error


def read_mapping(path: Path, needed: str = "at least run.name is needed") -> dict[Any, Any]:
    """Return the mapping in a YAML file. Raises ConfigError if it has none; `needed` says what an empty file lacks."""
    try:
        own = path.is_relative_to("/dev")  # a pipe of the user's shell, which is in no folder
        with reading(path), (path if own else regular(path, MOST_BYTES)).open("rb") as file:
            raw = read_value(file.read(MOST_BYTES + 1))
    except UserError as error:  # no file, or a large one
        raise ConfigError([str(error)]) from error
    except yaml.YAMLError as error:
        raise ConfigError([f"{path}{_yaml_fault(error)}"]) from error
    if raw is None:
        raise ConfigError([f"{path}: empty; {needed}"])
    if not isinstance(raw, dict):
        raise ConfigError([f"{path}: holds {show(raw)}, not a mapping of keys"])
    return raw


def changed(value: Any, change: Callable[[str], str]) -> Any:
    """Return `value` with each text in it changed."""
    if isinstance(value, dict):
        return {key: changed(each, change) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [changed(each, change) for each in value]
    return change(value) if isinstance(value, str) else value


def at_home(value: Any) -> Any:
    """Return `value` with the home directory of the user, or of NAME, for `~/` or `~NAME/` at the start of each text."""
    # An unknown NAME is left as it is.
    return changed(value, lambda text: os.path.expanduser(text) if text.startswith("~") and "/" in text else text)  # noqa: PTH111


def flat(section: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value with its dotted key; lists and empty mappings stay whole."""
    for key, value in section.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _yaml_fault(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f":{mark.line + 1}:{mark.column + 1}: not valid YAML: {error.problem}"
    return f": not valid YAML: {str(error).splitlines()[0]}"


def dump(raw: Mapping[str, Any], leaves_inline: bool = False) -> str:
    """Return keys and values as YAML, in their order.

    `leaves_inline`: write lists and mappings without nested ones on one line."""
    style = None if leaves_inline else False
    return yaml.dump(dict(raw), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120, default_flow_style=style)


def show(value: object) -> str:
    """Return a value as the user wrote it, on one line."""
    if isinstance(value, (dict, list)):
        return "a mapping" if isinstance(value, dict) else "a list"
    text = {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
