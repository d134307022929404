"""From the values that a translation found to a configuration of Sluice's: what differs from its defaults. No I/O."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from launcher.importing.keys import shown
from launcher.importing.settings import Carried, TranslatedKey, TranslatedSettings
from runtime.config import Config, Critic, Lora, RewardModel, Rewards, Run, loading
from runtime.errors import ConfigError

_BY_PRESENCE = ("critic", "lora")  # sections that say something even when empty


class Translation(Struct, frozen=True):
    """`raw` is the configuration: what differs from Sluice's defaults, by section."""

    program: str
    command: str
    raw: dict[str, Any]
    rows: tuple[TranslatedKey, ...]
    carried: tuple[Carried, ...]
    advice: tuple[str, ...]


def check(keys: TranslatedSettings) -> None:
    """Raises ConfigError: a line for each key that is unknown, of a wrong type, or asks for what Sluice does not do."""
    if faults := keys.faults or _schema_faults(keys):
        raise ConfigError(list(dict.fromkeys(faults)))


def translation(keys: TranslatedSettings, advice: Sequence[str]) -> Translation:
    """What `keys` has become. `advice`: what the user should know besides the single keys."""
    return Translation(
        keys.table.program,
        keys.table.command,
        _raw(keys.values),
        tuple(keys.rows()),
        tuple(each for each in map(_written, keys.carried()) if each.ours),
        tuple(advice),
    )


def _schema_faults(keys: TranslatedSettings) -> list[str]:
    """Values beyond what ours may be, by the names of theirs."""
    told = []
    for fault in loading.type_faults(_nested(keys.values)):
        path = fault.partition(":")[0]
        source = next((theirs for ours, theirs in keys.sources.items() if path == ours or path.startswith(f"{ours}.")), "")
        told.append(f"{source}: {fault}" if source else fault)
    return told


def _nested(values: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for path, value in values.items():
        *sections, name = path.split(".")
        node = made
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = dict(value) if isinstance(value, dict) else value
    return made


def _defaults() -> dict[str, Any]:
    """Ours, of every section that may be there."""
    whole = Config(run=Run(name=""), rewards=Rewards(model=RewardModel(path="")), critic=Critic(), lora=Lora())
    found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(whole))  # tuples become lists, as in a file
    return found


def _raw(values: dict[str, Any]) -> dict[str, Any]:
    """What differs from our defaults, in the order of the schema. A section that decides by being there stays."""
    raw, defaults = _nested(values), _defaults()
    if raw.get("trackers") == [{"name": each["name"]} for each in defaults["trackers"]]:
        del raw["trackers"]  # ours, but for the keys of each, which need not be written
    kept = _different(raw, defaults)
    named = [name for name in defaults if name in kept or (name in raw and name in _BY_PRESENCE)]
    return {name: kept.get(name, {}) for name in named}


def _different(section: dict[str, Any], default: dict[str, Any]) -> dict[str, Any]:
    """`section` without what equals `default`, in its order."""
    made: dict[str, Any] = {}
    for key in [*(key for key in default if key in section), *(key for key in section if key not in default)]:
        value, other = section[key], default.get(key)
        if isinstance(value, dict) and isinstance(other, dict):
            if inner := _different(value, other):
                made[key] = inner
        elif value != other:
            made[key] = value
    return made


def _written(carried: Carried) -> Carried:
    """`carried` with what it wrote that is not our default anyway."""
    return Carried(carried.path, carried.value, tuple(line for line in carried.ours if line not in _default_lines()))


@functools.cache
def _default_lines() -> frozenset[str]:
    """Our defaults, each as PATH=VALUE."""
    return frozenset(f"{path}={shown(value)}" for path, value in _paths(_defaults()))


def _paths(section: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        yield f"{prefix}{key}", value
        if isinstance(value, dict):
            yield from _paths(value, f"{prefix}{key}.")
