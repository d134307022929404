"""Where plain values are not of the schema's types: every place, in words. msgspec's own decoding stops at the first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

from msgspec import inspect

from runtime.config.yaml_text import show


def variants(kind: inspect.Type | None) -> tuple[inspect.Type, ...]:
    if isinstance(kind, inspect.UnionType):
        return kind.types
    return () if kind is None else (kind,)


def fields(kind: inspect.Type | None) -> tuple[inspect.Field, ...]:
    return kind.fields if isinstance(kind, inspect.StructType) else ()


def mismatches(value: object, kind: inspect.Type, path: str, root: inspect.Type) -> Iterator[str]:
    """Every place where `value` is not of type `kind`, within the schema `root`. msgspec's own decoding stops at the first."""
    if isinstance(kind, inspect.Metadata):  # a type with a unit
        kind = kind.type
    if isinstance(kind, inspect.UnionType):
        yield from _union_faults(value, kind, path, root)
    elif isinstance(kind, inspect.StructType) and isinstance(value, dict):
        yield from _struct_faults(value, kind, path, root)
    elif isinstance(kind, inspect.DictType) and isinstance(value, dict):
        for key, item in value.items():
            yield from mismatches(key, kind.key_type, f"{path}.{key}", root)
            yield from mismatches(item, kind.value_type, f"{path}.{key}", root)
    elif isinstance(kind, inspect.ListType) and isinstance(value, list):
        for index, item in enumerate(value):
            yield from mismatches(item, kind.item_type, f"{path}.{index}", root)
    elif isinstance(kind, inspect.TupleType) and isinstance(value, list):
        if len(value) != len(kind.item_types):
            yield f"{path}: has {len(value)} items, not {len(kind.item_types)}"
        for index, (item, item_type) in enumerate(zip(value, kind.item_types)):  # noqa: B905  unequal: said above
            yield from mismatches(item, item_type, f"{path}.{index}", root)
    elif not _fits(value, kind):
        hint = "; put it in quotes" if isinstance(kind, inspect.StrType) and isinstance(value, (bool, int, float)) else ""
        yield f"{path}: {show(value)} is not {_wanted(kind)}{hint}"


def _union_faults(value: object, kind: inspect.UnionType, path: str, root: inspect.Type) -> Iterator[str]:
    found = [list(mismatches(value, variant, path, root)) for variant in kind.types]
    if all(found):
        meant = [each for variant, each in zip(kind.types, found, strict=True) if _is_kind(value, variant)]
        yield from meant[0] if meant else [f"{path}: {show(value)} is not {_wanted(kind)}"]


def _is_kind(value: object, kind: inspect.Type) -> bool:
    """Whether `value` is of that kind as a whole, whatever is wrong within."""
    if isinstance(kind, (inspect.ListType, inspect.TupleType)):
        return isinstance(value, list)
    return bool(fields(kind)) and isinstance(value, dict)


def _struct_faults(value: dict[Any, Any], kind: inspect.StructType, path: str, root: inspect.Type) -> Iterator[str]:
    prefix = f"{path}." if path else ""
    known = {field.encode_name: field for field in kind.fields}
    for key, item in value.items():
        if key in known:
            yield from mismatches(item, known[key].type, prefix + key, root)
        else:
            yield f"{prefix}{key}: unknown key; {_nearest(str(key), list(known), root)}"
    for name, field in known.items():
        if field.required and name not in value:
            yield f"{prefix}{name}: missing; needs {_wanted(field.type)}"


def _nearest(key: str, names: list[str], root: inspect.Type) -> str:
    near = get_close_matches(key, names, n=1)
    elsewhere = [path for path in _paths(root) if path.rpartition(".")[2] == key]
    if near or len(elsewhere) == 1:
        return f"nearest is '{(near or elsewhere)[0]}'"
    return f"nearest are {', '.join(elsewhere)}" if elsewhere else f"allowed are {', '.join(names)}"


def _paths(kind: inspect.Type, prefix: str = "") -> Iterator[str]:
    for variant in variants(kind):
        for field in fields(variant):
            yield prefix + field.encode_name
            yield from _paths(field.type, f"{prefix}{field.encode_name}.")


def _fits(value: object, kind: inspect.Type) -> bool:
    if isinstance(kind, inspect.AnyType):
        return True
    if isinstance(kind, inspect.BoolType):
        return isinstance(value, bool)
    if isinstance(kind, inspect.NoneType):
        return value is None
    if isinstance(kind, inspect.StrType):
        return isinstance(value, str)
    if isinstance(kind, inspect.LiteralType):
        return any(type(value) is type(allowed) and value == allowed for allowed in kind.values)
    if isinstance(kind, (inspect.IntType, inspect.FloatType)):
        if isinstance(value, bool) or not isinstance(value, int if isinstance(kind, inspect.IntType) else (int, float)):
            return False
        low = (kind.gt is None or value > kind.gt) and (kind.ge is None or value >= kind.ge)
        high = (kind.lt is None or value < kind.lt) and (kind.le is None or value <= kind.le)
        return low and high and (isinstance(kind, inspect.IntType) or math.isfinite(value))
    return False


def _wanted(kind: inspect.Type) -> str:
    """`kind` in words, after "is not"."""
    if isinstance(kind, inspect.Metadata):
        kind = kind.type
    if isinstance(kind, inspect.UnionType):
        return " or ".join(_wanted(variant) for variant in kind.types)
    if isinstance(kind, inspect.LiteralType):
        return f"one of {', '.join(str(value) for value in kind.values)}"
    if isinstance(kind, (inspect.IntType, inspect.FloatType)):
        bounds = ((">", kind.gt), (">=", kind.ge), ("<", kind.lt), ("<=", kind.le))
        limits = " and ".join(f"{sign} {bound}" for sign, bound in bounds if bound is not None)
        return f"{'an integer' if isinstance(kind, inspect.IntType) else 'a finite number'} {limits}".rstrip()
    return _WORDS[type(kind)]


_WORDS: dict[type[inspect.Type], str] = {
    inspect.BoolType: "true or false",
    inspect.NoneType: "null",
    inspect.StrType: "a string",
    inspect.ListType: "a list",
    inspect.TupleType: "a list",
    inspect.DictType: "a mapping",
    inspect.StructType: "a section of keys",
}
