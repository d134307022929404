"""`python -m tests.unit.reference_page` writes docs/configuration-reference.md: every key, and what it means.

A key's path names its sections; `[]` stands for each item of a list, `NAME` for each name that a mapping has. Names in
MindSpeed-RL's files are those of `launcher.mindspeed.reading`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from launcher.config_reference import meanings, purpose
from launcher.mindspeed.reading import named_there
from runtime.config import UNIT, Config

PAGE = Path(__file__).parents[2] / "docs/configuration-reference.md"
COMMAND = "make reference"
_HEAD = """\
<!-- Written by `{command}` from runtime/config and launcher/mindspeed/keys.yaml. Changes belong there. -->
# Configuration reference

Every key of a configuration file: {keys} keys in {sections} sections. How the file is read, and what belongs together, is in
[configuration](configuration.md). `sluice schema` prints the same as a JSON Schema.

- `[]` stands for each item of a list: `rewards.rules[].name` is `rewards: {{rules: [{{name: ...}}]}}` in the file, and
  `rewards.rules.0.name=...` on the command line. `NAME` stands for each name of your own.
- A default that is empty (`""`), 0 or null often stands for something else; the meaning says for what.
- The last column names the keys of MindSpeed-RL's files that decide the same, where there are any.
"""
_COLUMNS = ("key", "type", "default", "unit", "meaning", "MindSpeed-RL")


class ReferenceKey(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the reference, as text. `default` and `unit` may be empty."""

    path: str
    type: str
    default: str
    unit: str
    meaning: str


class ReferenceSection(msgspec.Struct, frozen=True):
    """A section: its path, what it is for, and its own keys."""

    path: str
    purpose: str
    keys: list[ReferenceKey]


def parts() -> list[ReferenceSection]:
    """Return every section in the order of the schema, each before its subsections; the first is the file as a whole."""
    return list(_parts(inspect.type_info(Config), "", None))


def page() -> str:
    found = parts()
    head = _HEAD.format(command=COMMAND, keys=sum(len(part.keys) for part in found), sections=len(found) - 1)
    return "\n".join([head, *(_section(part) for part in found if part.path or part.keys)])


def _parts(kind: inspect.Type, path: str, default: Any) -> Iterator[ReferenceSection]:
    """Yield the section `kind` at `path`, whose default value is `default`, and its subsections."""
    if not isinstance(kind, inspect.StructType):
        return
    said = meanings(kind.cls)
    keys, below = [], []
    for field in kind.fields:
        here = f"{path}.{field.encode_name}".lstrip(".")
        value = _default(field) if default is None else getattr(default, field.name)
        if not isinstance(field.type, inspect.StructType) or field.name in said:
            keys.append(_key(here, field, value, said.get(field.name, "")))
        below += [part for inner in _inner(field.type, here, value) for part in _parts(*inner)]
    yield ReferenceSection(path, purpose(kind.cls), keys)
    yield from below


def _default(field: inspect.Field | msgspec.structs.FieldInfo) -> Any:
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()


def _inner(kind: inspect.Type, path: str, value: Any) -> Iterator[tuple[inspect.Type, str, Any]]:
    """Yield the sections directly in a field of type `kind`: type, path, default. Where a list of sections or a single one is
    allowed, only the single one counts.
    """
    if isinstance(kind, inspect.StructType):
        yield kind, path, value if isinstance(value, msgspec.Struct) else None
    elif isinstance(kind, inspect.ListType):
        yield kind.item_type, f"{path}[]", None
    elif isinstance(kind, inspect.DictType) and isinstance(kind.value_type, inspect.StructType):
        yield kind.value_type, f"{path}.NAME", None
    elif isinstance(kind, inspect.UnionType):
        single = [variant for variant in kind.types if isinstance(variant, inspect.StructType)]
        for variant in single or kind.types:
            yield from _inner(variant, path, value)


def _key(path: str, field: inspect.Field, value: Any, said: str) -> ReferenceKey:
    unit = _unit(field.type)
    return ReferenceKey(path=path, type=_words(field.type), default=_shown(value, unit), unit=unit, meaning=said)


def _unit(kind: inspect.Type) -> str:
    if isinstance(kind, inspect.Metadata):
        return (kind.extra_json_schema or {}).get(UNIT, "") or _unit(kind.type)
    if isinstance(kind, inspect.UnionType):
        return next(filter(None, map(_unit, kind.types)), "")
    if isinstance(kind, inspect.DictType):
        return _unit(kind.value_type)
    return _unit(kind.item_type) if isinstance(kind, inspect.ListType) else ""


def _words(kind: inspect.Type) -> str:
    match kind:
        case inspect.Metadata():
            return _words(kind.type)
        case inspect.UnionType():
            # None last.
            ordered = sorted(kind.types, key=lambda variant: isinstance(variant, inspect.NoneType))
            return " or ".join(_words(variant) for variant in ordered)
        case inspect.LiteralType():
            return ", ".join(f"`{value}`" for value in kind.values)
        case inspect.IntType() | inspect.FloatType():
            return f"{'integer' if isinstance(kind, inspect.IntType) else 'number'} {' and '.join(_bounds(kind))}".rstrip()
        case inspect.ListType():
            return f"list of: {_words(kind.item_type)}"
        case inspect.TupleType():
            return f"list of {len(kind.item_types)}: {_words(kind.item_types[0])}"
        case inspect.DictType():
            return f"mapping to: {_words(kind.value_type)}"
    return _PLAIN[type(kind)]


_PLAIN: dict[type[inspect.Type], str] = {
    inspect.AnyType: "anything",
    inspect.BoolType: "true, false",
    inspect.NoneType: "null",
    inspect.StrType: "string",
    inspect.StructType: "section",
}


def _bounds(kind: inspect.IntType | inspect.FloatType) -> list[str]:
    bounds = ((">", kind.gt), ("≥", kind.ge), ("<", kind.lt), ("≤", kind.le))
    return [f"{sign} {_number(bound)}" for sign, bound in bounds if bound is not None]


def _number(value: float) -> str:
    """Return a number without leading zeros in its exponent, and without a fraction of zeros."""
    return re.sub(r"e([-+])0+", r"e\1", f"{value:g}") if isinstance(value, float) else str(value)


def _shown(value: Any, unit: str) -> str:
    """Return a default as it stands in the file."""
    if value is msgspec.NODEFAULT:
        return "required"
    shown = f"`{_flow(value)}`"
    return f"{shown} ({_binary(value)})" if unit == "bytes" and isinstance(value, int) else shown


def _flow(value: Any) -> str:
    """Return YAML in one line."""
    match value:
        case None | True | False:
            return {None: "null", True: "true", False: "false"}[value]
        case int() | float():
            return _number(value)
        case list() | tuple():
            return f"[{', '.join(map(_flow, value))}]"
        case dict():
            return "{" + ", ".join(f"{name}: {_flow(one)}" for name, one in value.items()) + "}"
        case msgspec.Struct():
            return _flow({field.name: one for field, one in _given(value)})
    return value or '""'


def _given(value: msgspec.Struct) -> Iterator[tuple[msgspec.structs.FieldInfo, Any]]:
    """Yield the fields of a section that differ from their defaults."""
    for field in msgspec.structs.fields(value):
        one = getattr(value, field.name)
        if one != _default(field):
            yield field, one


def _binary(size: int) -> str:
    for power, name in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 1 << power and size % (1 << power) == 0:
            return f"{size >> power} {name}"
    return f"{size} B"


def _section(part: ReferenceSection) -> str:
    title = f"{'#' * min(2 + part.path.count('.'), 4)} {part.path}" if part.path else "## The file"
    lines = [title, "", part.purpose, ""]
    if part.keys:
        lines += [_row(_COLUMNS), _row(("---",) * len(_COLUMNS))]
        lines += [_row((f"`{key.path}`", key.type, key.default, key.unit, key.meaning, _theirs(key.path))) for key in part.keys]
        lines.append("")
    return "\n".join(lines)


def _theirs(path: str) -> str:
    return ", ".join(f"`{name}`" for name in named_there(path))


def _row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
