"""From a YAML file and overrides to a `Config`: reading, typed checking and derived defaults.

Scalars follow YAML 1.2's core schema: `1e-5` is a number, `on`, `no` and `2026-01-01` are strings. Keys may not occur twice.
Whatever is wrong is collected, so that one attempt shows every fault: one line each, with its path in the file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml
from msgspec import inspect
from msgspec.structs import replace

from runtime.cluster.topology import block_size
from runtime.config import Algorithm, Config, Parallel, Section, Services
from runtime.config.names import spell_out, with_names
from runtime.errors import ConfigError

S = TypeVar("S", bound=Section)

_ROOT = inspect.type_info(Config)
# By key: the type of the section that the file fills, and the folder (of configs/ in the source tree) of those that have names.
_PRESETS = {
    "algorithm.preset": (inspect.type_info(Algorithm), Path(__file__).parents[1] / "presets"),
    "services.preset": (inspect.type_info(Services), Path(__file__).parents[1] / "layouts"),
    "services.environment": (inspect.type_info(Services), Path(__file__).parents[1] / "envs"),
}
_SHOWN_CHARACTERS = 60

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
    """Quotes what `_Loader` would not read back as a string."""

    yaml_implicit_resolvers: dict[str | None, list[Any]] = {}

    def ignore_aliases(self, data: object) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        # Unquoted, some separators (U+0085) would be read back as spaces.
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=None if data.isprintable() else '"')


_Dumper.add_representer(str, _Dumper.represent_str)
for _tag, _pattern, _first in _CORE_SCHEMA:
    _Loader.add_implicit_resolver(_tag, re.compile(f"(?:{_pattern})$"), _first)
    _Dumper.add_implicit_resolver(_tag, re.compile(f"(?:{_pattern})$"), _first)


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read `path`, apply `key.path=value` overrides, fill in the presets and what layouts imply, and decode.

    Raises ConfigError with every fault found.
    """
    raw, faults = _overridden(read_mapping(Path(path)), overrides, _ROOT)
    faults += _faults(raw, _ROOT, "")
    for key in _PRESETS:
        faults += _fill_preset(raw, key)
    if faults:
        raise ConfigError(faults)
    _fill_processes(raw)
    return msgspec.convert(raw, Config)


def load_other(path: str | Path, overrides: Sequence[str], kind: type[S], advice: Mapping[str, str]) -> S:
    """Read `path`, apply overrides, and decode: a file of the schema `kind` instead of a run's configuration.

    `advice` says of keys that other programs have, and the schema has not, what to do. Raises ConfigError with every fault.
    """
    root = inspect.type_info(kind)
    needed = ", ".join(field.encode_name for field in _fields(root) if field.required)
    raw, faults = _overridden(read_mapping(Path(path), f"needed are {needed}"), overrides, root)
    faults += [f"{key}: {advice[key]}" for key in raw if key in advice]
    faults += _faults({key: value for key, value in raw.items() if key not in advice}, root, "", root)
    if faults:
        raise ConfigError(faults)
    return msgspec.convert(raw, kind)


def resolve(config: Config) -> Config:
    """Fill the defaults that follow from other values. Idempotent, so that it may run again once a warm-up named the model."""
    model, critic = config.model, config.critic
    return replace(
        config,
        run=replace(config.run, dir=config.run.dir or f"runs/{config.run.name}"),
        model=replace(model, reference=model.reference or model.path),
        critic=None if critic is None else replace(critic, path=critic.path or model.path),
        evaluation=replace(
            config.evaluation, max_new_tokens=config.evaluation.max_new_tokens or config.sampling.max_new_tokens
        ),
    )


def schema() -> dict[str, Any]:
    """The JSON Schema of a configuration file; `runtime.config.meanings` adds what the keys mean."""
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Sluice configuration"}
    return head | with_names(msgspec.json.schema(Config))


def to_yaml(config: Config) -> str:
    """The whole configuration, defaults included; `load` reads it back as an equal one."""
    return dump(msgspec.to_builtins(config))


def dump(raw: Mapping[str, Any], leaves_inline: bool = False) -> str:
    """Keys and values in YAML as this module reads it, in the order that they are in.

    `leaves_inline`: lists and mappings that hold no others are in one line.
    """
    style = None if leaves_inline else False
    return yaml.dump(dict(raw), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120, default_flow_style=style)


def type_faults(raw: Mapping[str, Any]) -> list[str]:
    """Where `raw`, as a file's content, is not of the schema: one line each, which begins with the key's path."""
    return list(_faults(dict(raw), _ROOT, ""))


def preset_names(key: str = "algorithm.preset") -> list[str]:
    """What such a key may name besides a file."""
    return sorted(path.stem for path in _PRESETS[key][1].glob("*.yaml"))


def _fill_preset(raw: dict[Any, Any], key: str) -> list[str]:
    """Give a section what it lacks of the file that `key` names; returns the faults found instead."""
    kind, folder = _PRESETS[key]
    section, _, own_key = key.partition(".")
    given = raw.get(section)
    name = given.get(own_key) if isinstance(given, dict) else None
    if not given or not name or not isinstance(name, str):
        return []
    if _is_whole(given, kind):
        return []  # a file that leaves nothing out, as a run's folder keeps it, outlives its preset
    own = name.endswith((".yaml", ".yml"))
    path = Path(name) if own else folder / f"{name}.yaml"
    if not own and name not in preset_names(key):
        return [f"{key}: '{name}' is not one of {', '.join(preset_names(key))}, nor a path to FILE.yaml"]
    try:
        preset = read_mapping(path, f"at least one key of section {section} is needed")
    except ConfigError as error:
        return [f"{key}: {fault}" for fault in error.faults]
    if own_key in preset:
        return [f"{key}: {path}: names a preset itself; they do not nest"]
    raw[section] = _filled(given, preset)
    return [f"{key}: {path}: {fault}" for fault in _faults(preset, kind, "")]


def _is_whole(given: object, kind: inspect.Type) -> bool:
    """Whether no key of the section `kind` is left out, nor one of the sections within."""
    return not isinstance(kind, inspect.StructType) or (
        isinstance(given, dict)
        and all(field.encode_name in given and _is_whole(given[field.encode_name], field.type) for field in kind.fields)
    )


def _filled(given: dict[Any, Any], preset: dict[Any, Any]) -> dict[Any, Any]:
    """`given`, with what the preset has besides, also within mappings that both have."""
    both = {key: _filled(given[key], preset[key]) for key in given if _are_mappings(given[key], preset.get(key))}
    return preset | given | both


def _are_mappings(*values: object) -> bool:
    return all(isinstance(value, dict) for value in values)


def _fill_processes(raw: dict[Any, Any]) -> None:
    """Give a section that leaves out `processes`, of a role on megatron-core, as many as its layout has places."""
    for role in ("trainer", "critic", "reference"):
        section = raw.get("services", {}).get(role, {})
        if section.get("engine") == "megatron" and "processes" not in section:
            parallel = msgspec.convert(section.get("parallel", {}), Parallel)
            section["processes"] = block_size(parallel) * (parallel.data or 1)


def read_mapping(path: Path, needed: str = "at least run.name is needed") -> dict[Any, Any]:
    """A YAML file that holds a mapping. Raises ConfigError; `needed` says what an empty one lacks."""
    try:
        raw = yaml.load(path.read_bytes(), Loader=_Loader)
        # Aliased nodes are one object; copied, an override of one place does not show in another.
        raw = msgspec.to_builtins(raw)
    except OSError as error:
        raise ConfigError([f"{path}: {(error.strerror or str(error)).lower()}"]) from error
    except yaml.YAMLError as error:
        raise ConfigError([f"{path}{_yaml_fault(error)}"]) from error
    except RecursionError as error:
        raise ConfigError([f"{path}: nested too deeply, or an alias that contains itself"]) from error
    if raw is None:
        raise ConfigError([f"{path}: empty; {needed}"])
    if not isinstance(raw, dict):
        raise ConfigError([f"{path}: holds {_show(raw)}, not a mapping of keys"])
    return raw


def _yaml_fault(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f":{mark.line + 1}:{mark.column + 1}: not valid YAML: {error.problem}"
    return f": not valid YAML: {str(error).splitlines()[0]}"


def _overridden(raw: dict[Any, Any], overrides: Sequence[str], root: inspect.Type) -> tuple[dict[Any, Any], list[str]]:
    """`raw` with the overrides applied, and the faults of those that could not be."""
    faults = spell_out(raw) if root is _ROOT else []
    for override in overrides:
        try:
            _apply(raw, override, root)
        except ConfigError as error:
            faults += error.faults
        faults += spell_out(raw) if root is _ROOT else []
    return raw, faults


def _apply(raw: dict[Any, Any], override: str, root: inspect.Type) -> None:
    """Set one `key.path=value` in `raw`. Sections on the way are made, list items must exist. Raises ConfigError."""
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError([f"override '{override}': not of the form key.path=value"])
    try:
        value = yaml.load(text, Loader=_Loader) if text.strip() else ""
    except yaml.YAMLError as error:
        raise ConfigError([f"override '{override}': the value is not valid YAML"]) from error
    node: Any = raw
    kind: inspect.Type | None = root
    for depth, part in enumerate(parts):
        here = ".".join(parts[: depth + 1])
        index: Any = part
        if isinstance(node, list):
            if not part.isdecimal() or int(part) >= len(node):
                raise ConfigError([f"{here}: no such item; the list has {len(node)}, counted from 0"])
            index = int(part)
        elif not isinstance(node, dict):
            raise ConfigError([f"{here}: {'.'.join(parts[:depth])} is {_show(node)}, which has no keys"])
        if depth == len(parts) - 1:
            node[index] = value
            return
        kind, default = _member(kind, part)
        if isinstance(node, dict) and node.get(index) is None:
            node[index] = default
        node = node[index]


def _member(kind: inspect.Type | None, name: str) -> tuple[inspect.Type | None, Any]:
    """Type and default, as a fresh container, of the section or list `name` in `kind`; (None, {}) where the schema has none."""
    for variant in _variants(kind):
        if isinstance(variant, inspect.ListType) and name.isdecimal():
            return variant.item_type, {}
        for field in _fields(variant):
            if field.encode_name == name:
                if not isinstance(field.type, inspect.ListType):
                    return field.type, {}
                made = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
                return field.type, msgspec.to_builtins([] if made is msgspec.NODEFAULT else made)
    return None, {}


def _variants(kind: inspect.Type | None) -> tuple[inspect.Type, ...]:
    if isinstance(kind, inspect.UnionType):
        return kind.types
    return () if kind is None else (kind,)


def _fields(kind: inspect.Type | None) -> tuple[inspect.Field, ...]:
    return kind.fields if isinstance(kind, inspect.StructType) else ()


def _faults(value: object, kind: inspect.Type, path: str, root: inspect.Type = _ROOT) -> Iterator[str]:
    """Every place where `value` is not of type `kind`, within the schema `root`. msgspec's own decoding stops at the first."""
    if isinstance(kind, inspect.Metadata):  # a type with a unit
        kind = kind.type
    if isinstance(kind, inspect.UnionType):
        yield from _union_faults(value, kind, path, root)
    elif isinstance(kind, inspect.StructType) and isinstance(value, dict):
        yield from _struct_faults(value, kind, path, root)
    elif isinstance(kind, inspect.DictType) and isinstance(value, dict):
        for key, item in value.items():
            yield from _faults(key, kind.key_type, f"{path}.{key}", root)
            yield from _faults(item, kind.value_type, f"{path}.{key}", root)
    elif isinstance(kind, inspect.ListType) and isinstance(value, list):
        for index, item in enumerate(value):
            yield from _faults(item, kind.item_type, f"{path}.{index}", root)
    elif isinstance(kind, inspect.TupleType) and isinstance(value, list):
        if len(value) != len(kind.item_types):
            yield f"{path}: has {len(value)} items, not {len(kind.item_types)}"
        for index, (item, item_type) in enumerate(zip(value, kind.item_types)):  # noqa: B905  unequal: said above
            yield from _faults(item, item_type, f"{path}.{index}", root)
    elif not _fits(value, kind):
        hint = "; put it in quotes" if isinstance(kind, inspect.StrType) and isinstance(value, (bool, int, float)) else ""
        yield f"{path}: {_show(value)} is not {_wanted(kind)}{hint}"


def _union_faults(value: object, kind: inspect.UnionType, path: str, root: inspect.Type) -> Iterator[str]:
    found = [list(_faults(value, variant, path, root)) for variant in kind.types]
    if all(found):
        meant = [faults for variant, faults in zip(kind.types, found, strict=True) if _is_kind(value, variant)]
        yield from meant[0] if meant else [f"{path}: {_show(value)} is not {_wanted(kind)}"]


def _is_kind(value: object, kind: inspect.Type) -> bool:
    """Whether `value` is of that kind as a whole, whatever is wrong within."""
    if isinstance(kind, (inspect.ListType, inspect.TupleType)):
        return isinstance(value, list)
    return bool(_fields(kind)) and isinstance(value, dict)


def _struct_faults(value: dict[Any, Any], kind: inspect.StructType, path: str, root: inspect.Type) -> Iterator[str]:
    prefix = f"{path}." if path else ""
    fields = {field.encode_name: field for field in kind.fields}
    for key, item in value.items():
        if key in fields:
            yield from _faults(item, fields[key].type, prefix + key, root)
        else:
            yield f"{prefix}{key}: unknown key; {_nearest(str(key), list(fields), root)}"
    for name, field in fields.items():
        if field.required and name not in value:
            yield f"{prefix}{name}: missing; needs {_wanted(field.type)}"


def _nearest(key: str, names: list[str], root: inspect.Type) -> str:
    near = get_close_matches(key, names, n=1)
    elsewhere = [path for path in _paths(root) if path.rpartition(".")[2] == key]
    if near or len(elsewhere) == 1:
        return f"nearest is '{(near or elsewhere)[0]}'"
    return f"nearest are {', '.join(elsewhere)}" if elsewhere else f"allowed are {', '.join(names)}"


def _paths(kind: inspect.Type, prefix: str = "") -> Iterator[str]:
    for variant in _variants(kind):
        for field in _fields(variant):
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


def _show(value: object) -> str:
    """A value as the user wrote it, on one line."""
    if isinstance(value, (dict, list)):
        return "a mapping" if isinstance(value, dict) else "a list"
    text = {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
