"""What each key means: the string under its field in `runtime.config`, read from the source; and the JSON Schema with it.

Only `sluice schema` and the reference need this. Whoever only loads a configuration reads no source.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import sys
from collections.abc import Iterator
from typing import Any

import msgspec

from runtime.config import Config, Section, loading


@functools.cache
def meanings(kind: type[msgspec.Struct]) -> dict[str, str]:
    """By field, those of the bases included: its meaning in one line. Fields that have none are left out."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if issubclass(base, Section):
            found |= _written(base.__module__).get(base.__name__, {})
    return found


def purpose(kind: type[msgspec.Struct]) -> str:
    """What a section is for, in one line."""
    return " ".join((kind.__doc__ or "").split())


def schema() -> dict[str, Any]:
    """The JSON Schema of a configuration file, with what each key means, for editors and `sluice schema`."""
    found = loading.schema()
    kinds = {kind.__name__: kind for kind in _sections(msgspec.inspect.type_info(Config))}
    for name, definition in found["$defs"].items():
        definition["description"] = purpose(kinds[name])
        for field, said in meanings(kinds[name]).items():
            definition["properties"][field]["description"] = said
    return found


@functools.cache
def _written(module: str) -> dict[str, dict[str, str]]:
    """By class and field of a module: the string below the field."""
    classes = [node for node in ast.parse(inspect.getsource(sys.modules[module])).body if isinstance(node, ast.ClassDef)]
    return {node.name: dict(_documented(node.body)) for node in classes}


def _documented(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    for field, after in itertools.pairwise(body):
        match field, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(said))):
                yield name, " ".join(said.split())


def _sections(kind: msgspec.inspect.Type) -> Iterator[type[msgspec.Struct]]:
    """The section that `kind` is, and all below it."""
    if isinstance(kind, msgspec.inspect.StructType):
        yield kind.cls
        for field in kind.fields:
            yield from _sections(field.type)
    elif isinstance(kind, msgspec.inspect.UnionType):
        for variant in kind.types:
            yield from _sections(variant)
    elif isinstance(kind, msgspec.inspect.ListType):
        yield from _sections(kind.item_type)
