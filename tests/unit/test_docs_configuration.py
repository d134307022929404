"""docs/configuration.md against the schema: the defaults that it names are those, and no key of a section is left out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from runtime.config import Config

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
KEY = re.compile(r"`([a-z_.]+)`")
LITERAL = re.compile(r"`[a-z0-9_]+`|\[?-?[0-9][-+.0-9e, ]*\]?|true|false|\[\]|\{\}")
SECTIONS = structs.fields(Config)


def described(text: str) -> Iterator[tuple[str, str]]:
    """(dotted key, default) of every row of the tables, where a row has as many defaults as keys."""
    section = ""
    for line in text.splitlines():
        if heading := re.match(r"##+ ([a-z_.]+)$", line):
            section = heading.group(1)
        elif line.startswith("| `") and section:
            keys, defaults = (cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:3])
            names = KEY.findall(keys)
            values = re.split(r", (?![^\[]*\])", defaults) if len(names) > 1 else [defaults]
            yield from ((f"{section}.{name}", value) for name, value in zip(names, values, strict=False))


def struct(annotation: Any) -> type[msgspec.Struct] | None:
    """The section that a field is, optional or not."""
    kinds = (annotation, *getattr(annotation, "__args__", ()))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, msgspec.Struct)), None)


def schema(section: type[msgspec.Struct] = Config, path: str = "") -> dict[str, Any]:
    """The default of every key by its dotted path; lists of sections are not entered."""
    found: dict[str, Any] = {}
    for field in structs.fields(section):
        inner = struct(field.type)
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        if inner is not None and not str(field.type).startswith("list"):
            base = default if isinstance(default, msgspec.Struct) else None
            for name, value in schema(inner).items():
                found[f"{path}{field.name}.{name}"] = value if base is None else reached(base, name, value)
        found[f"{path}{field.name}"] = default
    return found


def reached(base: msgspec.Struct, path: str, default: Any) -> Any:
    for name in path.split("."):
        base = getattr(base, name, None)  # type: ignore[assignment]
        if base is None:
            return default
    return base


def literal(told: str) -> Any:
    text = told.strip("`")
    return text if told.startswith("`") else json.loads(text)


DEFAULTS = schema()
NAMED = [
    (key, told) for key, told in described(PAGE.read_text(encoding="utf-8")) if key in DEFAULTS and LITERAL.fullmatch(told)
]


@pytest.mark.parametrize(("key", "told"), NAMED)
def test_a_default_that_is_named_is_the_default(key: str, told: str) -> None:
    default, value = DEFAULTS[key], literal(told)
    assert (tuple(value) if isinstance(default, tuple) else value) == default


@pytest.mark.parametrize("section", [field.name for field in SECTIONS])
def test_every_key_of_a_section_has_a_row(section: str) -> None:
    kind = struct(next(field.type for field in SECTIONS if field.name == section))
    assert kind is not None
    text = PAGE.read_text(encoding="utf-8")
    part = text[text.index(f"## {section}\n") :]
    part = part[: part.index("\n## ", 4)] if "\n## " in part[4:] else part
    missing = [field.name for field in structs.fields(kind) if not re.search(rf"[`.\[\]]{field.name}\b", part)]
    assert missing == []
