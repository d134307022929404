"""The translation of each key of another program's configuration: a typed table, from a `keys.yaml`. The table names the keys
of ours that a key of theirs decides. Values that differ here are translated by code. Names have underscores; those of the other
program may have dashes."""

from __future__ import annotations

import functools
import math
from collections import ChainMap
from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml
from msgspec import Struct

from runtime.config import Config, Critic, Lora, RewardModel, Rewards, Run, loading
from runtime.config.yaml_text import at_home, flat
from runtime.errors import ConfigError

# ---- Settings: the keys of another program's files, and a record of what became of each


class Unresolved(Struct, frozen=True):
    """A value that the file does not give. `text` stands in its place."""

    text: str
    why: str


class FileEntry(Struct, frozen=True):
    """A key with its value. `section`: of the file; `model` for the keys of a model's file."""

    section: str
    name: str  # with underscores; a key of a mapping within a section has dots
    value: Any
    model: str = ""

    @property
    def path(self) -> str:
        return ".".join(part for part in (self.section, self.model, self.name) if part)


class Read(Struct, frozen=True):
    """The contents of a file. `entries`: in the file's order, those of models last."""

    name: str  # the file's, without its suffix
    format: str  # one of the program's
    entries: tuple[FileEntry, ...]


class TranslatedKey(Struct, frozen=True):
    """What became of a key of the file. `ours`: PATH=VALUE of each of our keys that it decided."""

    path: str
    value: str
    outcome: Outcome
    ours: tuple[str, ...] = ()
    reason: str = ""


class CarriedDefault(Struct, frozen=True):
    """A default of the other program's that is not ours. It was written because the file leaves its key out."""

    path: str
    value: str
    ours: tuple[str, ...]


class Setting(Struct, frozen=True):
    """A key's value, as the other program would have it. `path`: that of the table if the file leaves the key out."""

    path: str
    value: Any
    given: bool


class TranslatedSettings:
    """Reads keys, and records what becomes of them. `without`: keys that the user leaves out, by the ends of their paths. They
    are neither translated nor refused, and ours keep their defaults. Keys that say what is trained cannot be left out."""

    def __init__(self, table: KeyTable, read: Read, without: Collection[str]):
        self.table = table
        self.name = read.name
        self.format = read.format
        self.values: dict[str, Any] = {}  # ours, by path
        self.sources: dict[str, str] = {}  # of ours: theirs
        self.faults: list[str] = []
        self.advice: list[str] = []  # what the user should know besides the single keys
        self._entries = read.entries
        self._left_out: set[str] = set()
        self._ours: dict[str, list[str]] = {}
        self._said: dict[str, str] = {}  # why a key decided nothing
        self._refused: set[str] = set()
        self._defaults: dict[str, tuple[Any, list[str]]] = {}
        for name in without:
            plain = name.strip().replace("-", "_")
            meant = [each for each in read.entries if f".{each.path}".endswith(f".{plain}")]
            self._left_out.update(each.path for each in meant)
            if not meant:
                self.faults.append(f"--without {name}: the file has no such key")
            elif bound := [each.path for each in meant if each.name in table.essential]:
                self.faults.append(f"--without {name}: {bound[0]} says what is trained, and cannot be left out")
        self._by_place = {(each.section, each.name): each for each in read.entries if not each.model}
        self._decided: dict[str, str] = {}  # what the user has to decide
        for each in read.entries:
            if each.path not in self._left_out:
                self._check(each)

    def _check(self, entry: FileEntry) -> None:
        key = self._key(entry)
        if key is None:
            near = self.table.nearest(entry.section, entry.name)
            self.faults.append(f"{entry.path}: unknown key" + (f"; {near}" if near else ""))
        elif isinstance(entry.value, Unresolved):
            self.faults.append(f"{entry.path}: {entry.value.text}: {entry.value.why}")
        elif key.to and (fault := key.fault(entry.value)):
            self.faults.append(f"{entry.path}: {fault}")
        elif key.decide and not key.asks_for_nothing(entry.value):
            self.decide(key.decide, Setting(entry.path, entry.value, True))
        elif key.refused and not key.asks_for_nothing(entry.value):
            self.refuse(Setting(entry.path, entry.value, True), key.refused)

    def _key(self, entry: FileEntry) -> TheirKey | None:
        return (self.table.find(entry.section, entry.name) or ("", None))[1]

    def of(self, section: str, name: str) -> Setting:
        """Return a key of a section that is no role's; the program's default if the file has none."""
        return self.setting(self._by_place.get((section, name)), section, name)

    def each(self, section: str, *names: str) -> list[Setting]:
        return [self.at(f"{section}.{name}") for name in names]

    def setting(self, entry: FileEntry | None, section: str, name: str) -> Setting:
        found = self.table.find(section, name)
        assert found is not None, f"the table has {section}.{name}"
        place, key = found
        if entry is None or (entry.value is None and entry.path not in self._left_out):
            path = entry.path if entry else f"{place}.{name}".lstrip(".")
            return Setting(path, self._typed(key, at_home(key.default)), False)
        if entry.path in self._left_out or isinstance(entry.value, Unresolved) or key.fault(entry.value):
            return Setting(entry.path, None, True)  # the fault is known; no more is said of the key
        return Setting(entry.path, self._typed(key, entry.value), True)

    def _typed(self, key: TheirKey, value: Any) -> Any:
        """Return 4.0 as 4 if the key's numbers are whole, and 4 as 4.0 if they are not."""
        kind = key.type or type(key.default).__name__
        if kind == "float" and type(value) is int:
            return float(value)
        return int(value) if kind == "int" and isinstance(value, float) else value

    def put(self, path: str, value: Any, *settings: Setting, item: str = "") -> None:
        """Ours becomes `value` unless that is None, because of `settings`. `item`: what they added to a list."""
        if value is None:
            return
        self.values[path] = value
        for setting in settings:
            if setting.path in self._left_out:
                continue
            line = f"{path}={shown([item] if item else value)}"
            if setting.given:
                self.sources.setdefault(path, setting.path)
                ours = self._ours.setdefault(setting.path, [])
                if line not in ours:
                    ours.append(line)
            else:
                self._defaults.setdefault(setting.path, (setting.value, []))[1].append(line)

    def add(self, path: str, item: str, setting: Setting) -> None:
        """Put `item` into ours, a list, if the setting is true."""
        if setting.value:
            self.put(path, list(dict.fromkeys([*self.values.get(path, ()), item])), setting, item=item)
        else:
            self.say("off", setting)

    def say(self, reason: str, *settings: Setting) -> None:
        """Record why a key decides nothing, in case that it decides nothing after all. The first reason stays."""
        for setting in settings:
            if setting.given:
                self._said.setdefault(setting.path, reason)

    def refuse(self, setting: Setting, reason: str) -> None:
        """Refuse a value that asks for something impossible here."""
        if setting.path not in self._refused:
            self._refused.add(setting.path)
            self._said[setting.path] = reason
            self.faults.append(f"{setting.path}: {shown(setting.value)}: refused: {reason}")

    def decide(self, reason: str, *settings: Setting) -> None:
        """Record what the user has to check or to add, with the keys that it comes from."""
        self.advice.append(f"{', '.join(setting.path for setting in settings)}: {reason}")
        self._decided.update({setting.path: reason for setting in settings if setting.given})

    def not_of_critic(self, setting: Setting, policys: Any) -> None:
        """Report a setting of the critic's optimizer that differs from the policy's, which Sluice has for both."""
        if setting.given and setting.value not in (None, policys):
            self.decide(f"not carried over: the critic has training.optimizer, where it is {shown(policys)}", setting)

    def has(self, section: str) -> bool:
        """Return whether files of this format may have a section of the table."""
        return True

    def at(self, path: str) -> Setting:
        """Return a key by its path, whatever its section."""
        return self.of(*self.table.place(path))

    def copy(self, facts: Mapping[str, Any]) -> None:
        """Copy every key of the table that is the same here, or has its values by name, if its facts hold."""
        for section in filter(self.has, self.table.sections):
            for name, key in self.table.sections[section].items():
                if not (key.copy or key.item or key.values):
                    continue
                setting = self.of(section, name)
                if any(facts.get(fact) != wanted for fact, wanted in key.when.items()):
                    continue
                if key.item:
                    for path in key.to:
                        self.add(path, key.item, setting)
                elif setting.given or not key.given:
                    value = setting.value if key.copy else self.chosen(setting, key.values)
                    value = value if None in (value, key.least) else max(key.least, value)
                    for path in key.to:
                        self.put(f"{path}.{name}" if path.endswith("engine_args") else path, value, setting)

    def chosen(self, setting: Setting, values: Mapping[str, Any]) -> Any:
        """Return our value for one of theirs. A value without ours is refused, and gives None."""
        if setting.value is not None and shown(setting.value) not in values:
            self.refuse(setting, f"must be one of {', '.join(values)}")
        return values.get(shown(setting.value))

    def rows(self) -> Iterator[TranslatedKey]:
        """Yield a row for each key of the file, in the file's order."""
        for entry in self._entries:
            path, value = entry.path, entry.value.text if isinstance(entry.value, Unresolved) else shown(entry.value)
            key = self._key(entry)
            if path in self._left_out:
                yield TranslatedKey(path, value, "left out", reason="--without")
            elif key is not None:
                yield self._row(entry, value, key)

    def _row(self, entry: FileEntry, value: str, key: TheirKey) -> TranslatedKey:
        path = entry.path
        ours, said = tuple(self._ours.get(path, ())), self._said.get(path, "")
        if path in self._refused:
            return TranslatedKey(path, value, "refused", reason=said)
        if path in self._decided:
            return TranslatedKey(path, value, "to decide", ours, self._decided[path])
        if ours:
            return TranslatedKey(path, value, "mapped", ours, key.note)
        off = "off there too: it asks for nothing" if key.refused or key.decide else key.ignored
        alike = (each for each in self._entries if each.path in self._ours and self._key(each) is key)
        over = "".join(f"{each.path} stands over it" for each in [*alike][-1:])  # a section nearer to the role has it
        empty = "left empty" if entry.value is None else ""
        reason = said or off or empty or over or key.otherwise or f"{entry.section} takes none of its own"
        return TranslatedKey(path, value, "ignored", reason=reason)

    def carried(self, ours: Collection[str]) -> Iterator[CarriedDefault]:
        """Yield the program's defaults among what was written, by key, without the lines of `ours`, Sluice's own."""
        for path, (value, lines) in self._defaults.items():
            if others := tuple(line for line in dict.fromkeys(lines) if line not in ours):
                yield CarriedDefault(path, shown(value), others)


def given(*settings: Setting) -> list[Setting]:
    """Return the settings that the file has."""
    return [each for each in settings if each.given]


def scaled(least: float | None, policys: float | None, critics: float | None) -> float | None:
    """Return `least`, of the policy's learning rate, in proportion to the critic's."""
    return least * critics / policys if least and policys and critics else least


# ---- Translation to a configuration of Sluice's: what differs from its defaults

_BY_PRESENCE = ("critic", "lora")  # sections that have a meaning even when empty


class Translation(Struct, frozen=True):
    """`raw` is the configuration: what differs from Sluice's defaults, by section."""

    program: str
    command: str
    raw: dict[str, Any]
    rows: tuple[TranslatedKey, ...]
    carried: tuple[CarriedDefault, ...]
    advice: tuple[str, ...]


def translation(keys: TranslatedSettings, advice: Sequence[str]) -> Translation:
    """Return the translation of `keys`. `advice`: what the user should know besides the single keys. Raises ConfigError: a line
    for each key that is unknown, of a wrong type, or impossible in Sluice."""
    if faults := keys.faults or _schema_faults(keys):
        raise ConfigError(list(dict.fromkeys(faults)))
    return Translation(
        keys.table.program,
        keys.table.command,
        _raw(keys.values),
        tuple(keys.rows()),
        tuple(keys.carried(frozenset(f"{path}={shown(value)}" for path, value in flat(_defaults())))),
        tuple(advice),
    )


def _schema_faults(keys: TranslatedSettings) -> list[str]:
    """Return the faults of values that our keys do not allow, under the names of their keys."""
    faults = []
    for fault in loading.type_faults(_nested(keys.values)):
        path = f"{fault.partition(':')[0]}."
        named = (f"{theirs}: {fault}" for ours, theirs in keys.sources.items() if path.startswith(f"{ours}."))
        faults.append(next(named, fault))
    return faults


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
    """Return our defaults, of every section that may be there."""
    whole = Config(run=Run(name=""), rewards=Rewards(model=RewardModel(path="")), critic=Critic(), lora=Lora())
    found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(whole))  # tuples become lists, as in a file
    return found


def _raw(values: dict[str, Any]) -> dict[str, Any]:
    """Return what differs from our defaults, in the order of the schema. A section whose presence decides something stays."""
    raw, defaults = _nested(values), _defaults()
    if raw.get("trackers") == [{"name": each["name"]} for each in defaults["trackers"]]:
        del raw["trackers"]  # the defaults, whose own keys need not be written
    kept = _different(raw, defaults)
    named = [name for name in defaults if name in kept or (name in raw and name in _BY_PRESENCE)]
    return {name: kept.get(name, {}) for name in named}


def _different(section: dict[str, Any], default: dict[str, Any]) -> dict[str, Any]:
    """Return `section` without values that equal `default`, in the order of `default`."""
    made: dict[str, Any] = {}
    for key in [*(key for key in default if key in section), *(key for key in section if key not in default)]:
        value, other = section[key], default.get(key)
        if isinstance(value, dict) and isinstance(other, dict):
            if inner := _different(value, other):
                made[key] = inner
        elif value != other:
            made[key] = value
    return made


Outcome = Literal["mapped", "ignored", "to decide", "refused", "left out"]

_TYPES: dict[str, tuple[tuple[type, ...], str]] = {  # with the words for them
    "bool": ((bool,), "true or false"),
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "str": ((str,), "text"),
    "list": ((list,), "a list"),
    "map": ((dict,), "a mapping"),
}


class TheirKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Has exactly one of `to`, `decide`, `ignored` and `refused`."""

    default: Any = None  # of the other program
    type: str = ""  # str, bool, int, float, list, map or several with "|"; "": that of the default
    to: list[str] = []  # mapped: the paths of our keys that it decides, alone or together with other keys
    note: str = ""  # how, if that is not obvious; with its unit
    copy: bool = False  # mapped: all of `to` get its value unchanged
    given: bool = False  # with `copy` and `values`: only if the file has it
    least: int | None = None  # with `copy`: values below it become it
    item: str = ""  # mapped, a bool: all of `to`, which are lists, have this where it is true
    values: dict[str, Any] = {}  # mapped: our values, by theirs as they are shown; other values are refused
    when: dict[str, Any] = {}  # of `copy`, `item` and `values`: by facts of a translation, when they hold; else it is ignored
    otherwise: str = ""  # why it decides nothing, where it decides nothing
    decide: str = ""  # what the user has to do about a value other than `default`
    ignored: str = ""  # why it has no counterpart, and needs none
    refused: str = ""  # why a value other than `default` is impossible here, and what to do instead
    inert: list[Any] = []  # values besides the default that ask for nothing
    essential: bool = False  # says what is trained, the model's structure or the kind of training: cannot be left out

    def fault(self, value: Any) -> str:
        """Return why `value` has a wrong type, "" if it does not. Every key may be null."""
        of_default = next((name for name, (types, _) in _TYPES.items() if isinstance(self.default, types)), "")
        kinds = (self.type or of_default).split("|")
        if value is None or kinds == [""] or any(_is(value, kind) for kind in kinds):
            return ""
        return f"{shown(value)} is not {' or '.join(_TYPES[kind][1] for kind in kinds)}"

    def asks_for_nothing(self, value: Any) -> bool:
        inert = (self.default, *self.inert)
        return value is None or any(isinstance(value, bool) is isinstance(one, bool) and value == one for one in inert)


def shown(value: Any) -> str:
    """Return a value in YAML's flow style, on one line. Text has quotes only if YAML would read it as something else."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, str):
        return value if value and value == value.strip() and value.isprintable() else repr(value)
    text = yaml.safe_dump(value, default_flow_style=True, width=math.inf, sort_keys=False).strip()
    return text.removesuffix("...").strip()


def _is(value: Any, kind: str) -> bool:
    if kind == "int" and isinstance(value, float):
        return value.is_integer()  # 1.0 counts as 1
    finite = not isinstance(value, float) or math.isfinite(value)
    return isinstance(value, _TYPES[kind][0]) and finite and (kind == "bool" or not isinstance(value, bool))


class KeyTable:
    """The keys of one program's files, by section (`rl_config`), then by name; `mtp.*` stands for all names that begin so.
    `program`: its name. `command`: ours that imports its files. `places`: for a section of a file, the sections of the table in
    which its keys are looked up, in order. Keys of other sections are looked up in their own section alone."""

    def __init__(self, program: str, command: str, file: Path, places: Mapping[str, tuple[str, ...]] | None = None):
        self.program = program
        self.command = command
        self._file = file
        self._places = places or {}

    @functools.cached_property
    def sections(self) -> dict[str, dict[str, TheirKey]]:
        return msgspec.convert(yaml.safe_load(self._file.read_bytes()), dict[str, dict[str, TheirKey]])

    @functools.cached_property
    def essential(self) -> frozenset[str]:
        """The names of keys that say what is trained, in any section."""
        return frozenset(name for keys in self.sections.values() for name, key in keys.items() if key.essential)

    def find(self, section: str, name: str) -> tuple[str, TheirKey] | None:
        """Return the section of the table that has a key of a file's `section`, and the key."""
        parts = name.split(".")
        patterns = [name, f"{name}.*", *(".".join([*parts[:end], "*"]) for end in range(len(parts) - 1, -1, -1))]
        places = self._places.get(section, (section,))
        known = ((place, self.sections.get(place, {}), pattern) for place in places for pattern in patterns)
        return next(((place, keys[pattern]) for place, keys, pattern in known if pattern in keys), None)

    def place(self, path: str) -> tuple[str, str]:
        """Return the section of a path, the longest one that the table has, and the name in it."""
        sections = [section for section in self.sections if section and path.startswith(f"{section}.")]
        section = max(sections, key=len, default="")
        return section, path.removeprefix(f"{section}.")

    def names(self, section: str) -> Mapping[str, TheirKey]:
        """Return the keys that a file's `section` may have."""
        return ChainMap(*(self.sections.get(place, {}) for place in self._places.get(section, (section,))))

    def nearest(self, section: str, name: str) -> str:
        """Return a hint on an unknown key: a near one of its section, or the same one of another section; "" for none."""
        near = get_close_matches(name, list(self.names(section)), n=1, cutoff=0.6)
        if near:
            return f"nearest is {near[0]}"
        elsewhere = [place for place, keys in self.sections.items() if name in keys]
        return f"{elsewhere[0] or 'the top level'} has one" if elsewhere else ""
