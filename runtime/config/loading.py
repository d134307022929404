"""From a YAML file and overrides to a `Config`, with presets and derived defaults.

Whatever is wrong is collected, so that one attempt shows every fault: one line each, with its path in the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml
from msgspec import inspect
from msgspec.structs import replace

from runtime.cluster.topology import block_size
from runtime.config import Algorithm, Config, Parallel, Section, Services
from runtime.config.mismatches import fields, mismatches, variants
from runtime.config.names import spell_out, with_names
from runtime.config.yaml_text import dump, read_mapping, read_value, show
from runtime.errors import ConfigError

S = TypeVar("S", bound=Section)

_MINDSPEED = ("megatron_training", "actor_rollout_ref")  # sections of its two formats, which ours has not

_ROOT = inspect.type_info(Config)
# By key: the type of the section that the file fills, and the folder (of configs/ in the source tree) of those that have names.
_PRESETS = {
    "algorithm.preset": (inspect.type_info(Algorithm), Path(__file__).parent / "presets"),
    "services.preset": (inspect.type_info(Services), Path(__file__).parent / "layouts"),
    "services.environment": (inspect.type_info(Services), Path(__file__).parent / "envs"),
}


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read `path`, apply `key.path=value` overrides, fill in the presets and what layouts imply, and decode.

    Raises ConfigError with every fault found.
    """
    raw = read_mapping(Path(path))
    if theirs := [section for section in _MINDSPEED if section in raw]:
        raise ConfigError(
            [f"{path}: has MindSpeed-RL's section {theirs[0]}; sluice import-mindspeed makes a configuration of it"]
        )
    raw, faults = _overridden(raw, overrides, _ROOT)
    faults += mismatches(raw, _ROOT, "", _ROOT)
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
    needed = ", ".join(field.encode_name for field in fields(root) if field.required)
    raw, faults = _overridden(read_mapping(Path(path), f"needed are {needed}"), overrides, root)
    faults += [f"{key}: {advice[key]}" for key in raw if key in advice]
    faults += mismatches({key: value for key, value in raw.items() if key not in advice}, root, "", root)
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


def type_faults(raw: Mapping[str, Any]) -> list[str]:
    """Where `raw`, as a file's content, is not of the schema: one line each, which begins with the key's path."""
    return list(mismatches(dict(raw), _ROOT, "", _ROOT))


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
    return [f"{key}: {path}: {fault}" for fault in mismatches(preset, kind, "", _ROOT)]


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
        value = read_value(text) if text.strip() else ""
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
            raise ConfigError([f"{here}: {'.'.join(parts[:depth])} is {show(node)}, which has no keys"])
        if depth == len(parts) - 1:
            node[index] = value
            return
        kind, default = _member(kind, part)
        if isinstance(node, dict) and node.get(index) is None:
            node[index] = default
        node = node[index]


def _member(kind: inspect.Type | None, name: str) -> tuple[inspect.Type | None, Any]:
    """Type and default, as a fresh container, of the section or list `name` in `kind`; (None, {}) where the schema has none."""
    for variant in variants(kind):
        if isinstance(variant, inspect.ListType) and name.isdecimal():
            return variant.item_type, {}
        for field in fields(variant):
            if field.encode_name == name:
                if not isinstance(field.type, inspect.ListType):
                    return field.type, {}
                made = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
                return field.type, msgspec.to_builtins([] if made is msgspec.NODEFAULT else made)
    return None, {}
