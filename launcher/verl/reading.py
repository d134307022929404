"""From a file of verl's to one flat list of keys and values: YAML, what its trainer prints, or a script that calls it."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from launcher.importing.keys import KeyTable
from launcher.importing.settings import FileEntry, Read, Unresolved
from launcher.verl.script import TRAINERS, UNKNOWN, Script
from runtime.config.yaml_text import at_home, read_mapping, read_value
from runtime.errors import ConfigError

TABLE = KeyTable("verl", "import-verl", Path(__file__).parent / "keys.yaml")
FULLY, ONE_STEP, SYNCHRONOUS = "fully_async", "one_step_off", "main_ppo"  # the trainers, by a part of their modules' names

_SECTIONS = ("actor_rollout_ref", "algorithm", "data", "trainer")
_CALLS = re.compile(rf"^[^#\n]*\b(?:{'|'.join(TRAINERS)})\b", re.MULTILINE)
_OPTION = re.compile(r"(?<![^\x01])(--config-\w+)\x01")  # --config-name NAME
_LOGGED = re.compile(r"^(?:\x1b\[\d+m)?\(\w+ pid=[^)]*\)(?:\x1b\[0m)? ?", re.MULTILINE)
_REFERENCE = re.compile(r"\$\{(oc\.select:|oc\.env:)?\s*(\.?[\w.]+)\s*(?:,\s*((?:\{\}|[^${}])*?)\s*)?\}")
_MODELS = ("model.path", "reward_model.model_path")  # ends of keys that name models
_DEPTH = 8  # of references to references


def read(file: Path, models: Path | None = None) -> Read:
    """Read `file`; a model named as on the Hub is a folder of `models`, where it is there.

    Raises ConfigError, one line per fault, each with the key's path in its file.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{file}: cannot be read: {getattr(error, 'strerror', None) or 'it is not text'}"]) from error
    scripted = text.startswith("#!") or file.suffix in (".sh", ".bash") or _CALLS.search(text)
    values = _overrides(file, text) if scripted else _sections(file, text)
    module = str(values.pop("module", ""))
    kind = FULLY if "async_training.staleness_threshold" in values else ONE_STEP if "rollout.nnodes" in values else SYNCHRONOUS
    entries = [
        FileEntry(*TABLE.place(path), _found(path, _resolved(path, value, values), models)) for path, value in values.items()
    ]
    return Read(file.stem, next((name for name in (FULLY, ONE_STEP) if name in module), kind), tuple(entries))


def _overrides(file: Path, text: str) -> dict[str, Any]:
    try:
        calls = Script(text, os.environ).calls
    except (ValueError, RecursionError) as error:
        raise ConfigError([f"{file}: is no shell script that can be read: {error}"]) from error
    if len(calls) != 1:
        count = "no call" if not calls else f"{len(calls)} calls"
        raise ConfigError([f"{file}: has {count} of verl's trainer (python3 -m verl.trainer.main_ppo); must have one"])
    values: dict[str, Any] = {"module": calls[0][0]}
    faults = []
    for word in filter(None, _OPTION.sub("\\1=", "\x01".join(calls[0][1:])).split("\x01")):
        path, equals, value = word.lstrip("+").partition("=")
        path = path.removeprefix("--").replace("config-", "config_")
        if word.startswith("~"):
            values.pop(path.lstrip("~"), None)
        elif not equals or UNKNOWN in path:
            faults.append(f"{file}: {word.replace(UNKNOWN, '')}: is not KEY=VALUE, as far as it is known here")
        else:
            values.pop(path, None)
            values[path] = _value(value)
    if faults:
        raise ConfigError(faults)
    return values


def _value(text: str) -> Any:
    if UNKNOWN in text:
        part = text.split(UNKNOWN)[1]
        return Unresolved(
            text.replace(UNKNOWN, ""), f"{part} is not known here; set its variable in the environment, or write it"
        )
    try:
        return read_value(text) if text else ""
    except yaml.YAMLError:
        return text


def _sections(file: Path, text: str) -> dict[str, Any]:
    printed = _LOGGED.sub("", text).strip()
    if printed.startswith("{'"):  # pprint's
        try:
            raw = ast.literal_eval(printed)
        except (ValueError, SyntaxError, RecursionError) as error:
            raise ConfigError([f"{file}: begins as what verl prints of its configuration, but does not end so"]) from error
    else:
        raw = read_mapping(file, "verl's sections are needed")
    other = "sluice import-mindspeed" if "rl_config" in raw else "sluice validate" if "run" in raw else ""
    if other or not any(isinstance(raw.get(section), dict) for section in _SECTIONS):
        hint = f"; {other} reads it" if other else f" ({', '.join(_SECTIONS)})"
        raise ConfigError([f"{file}: is no configuration of verl's, and no script that calls its trainer{hint}"])
    names = [each for each in raw.pop("defaults", None) or [] if isinstance(each, str) and "trainer" in each]
    return dict([("config_name", name) for name in names[:1]] + _flat(raw, ""))


def _flat(section: Mapping[Any, Any], prefix: str) -> list[tuple[str, Any]]:
    found = []
    for name, value in section.items():
        if isinstance(value, dict):
            found += _flat(value, f"{prefix}{name}.")
        elif name != "_target_" and value != "???":  # of Hydra: missing
            found.append((f"{prefix}{name}", value))
    return found


def _resolved(path: str, value: Any, values: Mapping[str, Any], depth: int = _DEPTH) -> Any:
    """`value` with other keys' in the place of `${...}`."""

    def named(found: re.Match[str]) -> Any:
        kind, name, default = found.groups()
        if kind == "oc.env:":
            return os.environ.get(name, default)
        whole = f"{path.rpartition('.')[0]}{name}" if name.startswith(".") else name
        known = TABLE.find(*TABLE.place(whole))
        if whole in values:
            return values[whole]
        if any(other.startswith(f"{whole}.") for other in values):
            return None  # a section, whose keys are looked at where they are
        return _value(default) if default is not None else known[1].default if known else found[0]

    if not isinstance(value, str) or "${" not in value:
        return value
    alone = _REFERENCE.fullmatch(value)
    result = named(alone) if alone else _REFERENCE.sub(lambda found: str(named(found)), value)
    if not depth or result == value:
        return Unresolved(value, "is not resolved here; write the value")
    return _resolved(path, result, values, depth - 1)


def _found(path: str, value: Any, models: Path | None) -> Any:
    if isinstance(value, list):
        return [_found(path, each, models) for each in value]
    value = at_home(value)
    if models is not None and isinstance(value, str) and path.endswith(_MODELS) and not Path(value).is_dir():
        folders = [folder for folder in (models / value, models / Path(value).name) if folder.is_dir()]
        return str(folders[0]) if folders else value
    return value
