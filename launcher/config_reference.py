"""The meaning of each key, and the JSON Schema of a configuration file. The string under a field is its meaning. It is read
from the source, since loading a configuration does not need it."""

from __future__ import annotations

import argparse
import ast
import functools
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from runtime.config import Config, Section
from runtime.config.model import TINY_PREFIX


@functools.cache
def meanings(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Return the meaning of each field in one line, by field, base classes included. Fields without one are left out."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if issubclass(base, Section):
            found |= _written(base.__module__).get(base.__name__, {})
    return found


def purpose(kind: type[msgspec.Struct]) -> str:
    """Return what a section is for, in one line."""
    return " ".join((kind.__doc__ or "").split())


def run(_: argparse.Namespace) -> None:
    print(json.dumps(schema(), indent=2))


def schema() -> dict[str, Any]:
    """Return the JSON Schema of a configuration file, with the meaning of each key, for editors and `sluice schema`."""
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Sluice configuration"}
    found: dict[str, Any] = head | msgspec.json.schema(Config)
    keys = found["$defs"]["Config"]["properties"]
    for key, name in _NAMES.items():
        keys[key] = {"anyOf": [keys[key], name]}
    kinds = {kind.__name__: kind for kind in _sections(Section)}
    for section, definition in found["$defs"].items():
        kind = kinds[section]
        definition["description"] = purpose(kind)
        said = meanings(kind)
        for field in (field for field in msgspec.structs.fields(kind) if field.name in said):
            definition["properties"][field.encode_name]["description"] = said[field.name]
    return found


def _sections(kind: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _sections(each)


@functools.cache
def _written(module: str) -> dict[str, dict[str, str]]:
    """Return the string below each field of a module, by class and field."""
    tree = ast.parse(Path(sys.modules[module].__file__ or "").read_text(encoding="utf-8"))
    return {node.name: dict(_documented(node.body)) for node in tree.body if isinstance(node, ast.ClassDef)}


def _documented(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    for field, after in itertools.pairwise(body):
        match field, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(said))):
                yield name, " ".join(said.split())


_NAMES: dict[str, dict[str, Any]] = {  # sections that may be a name instead
    "model": {
        "type": "string",
        "pattern": f"^{TINY_PREFIX}",
        "description": "A small random model of that family for every role.",
    },
    "services": {"type": "string", "minLength": 1, "description": "A layout, as services.preset names it."},
}
