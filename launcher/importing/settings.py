"""The keys of another program's files as a translation reads them, and a record of what became of each. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from msgspec import Struct

from launcher.importing.keys import KeyTable, Outcome, TheirKey, shown
from runtime.config.yaml_text import at_home


class Unresolved(Struct, frozen=True):
    """A value that the file does not say. `text` is what stands in its place."""

    text: str
    why: str


class FileEntry(Struct, frozen=True):
    """A key with its value. `section` is that of the file, `model` for those of a model's file."""

    section: str
    name: str  # with underscores; of a mapping within a section with dots
    value: Any
    model: str = ""

    @property
    def path(self) -> str:
        return ".".join(part for part in (self.section, self.model, self.name) if part)


class Read(Struct, frozen=True):
    """What a file says. `entries` are in the file's order, those of models last."""

    name: str  # the file's, without its suffix
    format: str  # which of the program's
    entries: tuple[FileEntry, ...]


class TranslatedKey(Struct, frozen=True):
    """What became of a key of the file. `ours`: PATH=VALUE of each of our keys that it decided."""

    path: str
    value: str
    outcome: Outcome
    ours: tuple[str, ...] = ()
    reason: str = ""


class Carried(Struct, frozen=True):
    """A default of the other program's that is not ours, and was written because the file leaves its key to it."""

    path: str
    value: str
    ours: tuple[str, ...]


class Setting(Struct, frozen=True):
    """A key's value, as the other program would have it. `path` is the table's where the file leaves the key to its default."""

    path: str
    value: Any
    given: bool


class TranslatedSettings:
    """Reads keys, and records what becomes of them.

    `without`: keys that the user leaves out, by the ends of their paths. They are neither translated nor refused, and what they
    would have decided stays at Sluice's default. What says what is trained cannot be left out.
    """

    def __init__(self, table: KeyTable, read: Read, without: Collection[str]):
        self.table = table
        self.name = read.name
        self.format = read.format
        self.values: dict[str, Any] = {}  # ours, by path
        self.sources: dict[str, str] = {}  # of ours: theirs
        self.faults: list[str] = []
        self.advice: list[str] = []  # what the user should know beside the single keys
        self._entries = read.entries
        self._left_out = {each.path for each in read.entries for name in without if _ends(each.path, _plain(name))}
        self._ours: dict[str, list[str]] = {}
        self._said: dict[str, str] = {}  # why nothing came of it
        self._noted: dict[str, str] = {}  # how it was translated, where that differs from the table's note
        self._refused: set[str] = set()
        self._defaults: dict[str, tuple[Any, list[str]]] = {}
        for name in without:
            meant = [each for each in read.entries if _ends(each.path, _plain(name))]
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
        found = self.table.find(entry.section, entry.name)
        if found is None:
            near = self.table.nearest(entry.section, entry.name)
            self.faults.append(f"{entry.path}: unknown key" + (f"; {near}" if near else ""))
        elif isinstance(entry.value, Unresolved):
            self.faults.append(f"{entry.path}: {entry.value.text}: {entry.value.why}")
        elif found[1].to and (fault := found[1].fault(entry.value)):
            self.faults.append(f"{entry.path}: {fault}")
        elif found[1].decide and not found[1].asks_for_nothing(entry.value):
            self.decide(found[1].decide, Setting(entry.path, entry.value, True))
        elif found[1].refused and not found[1].asks_for_nothing(entry.value):
            self.refuse(Setting(entry.path, entry.value, True), found[1].refused)

    def of(self, section: str, name: str) -> Setting:
        """A key of a section that is no role's; the program's default where the file has none."""
        return self.setting(self._by_place.get((section, name)), section, name)

    def setting(self, entry: FileEntry | None, section: str, name: str) -> Setting:
        found = self.table.find(section, name)
        assert found is not None, f"the table has {section}.{name}"
        place, key = found
        if entry is None or (entry.value is None and entry.path not in self._left_out):
            return Setting(entry.path if entry else f"{place}.{name}".lstrip("."), _typed(key, at_home(key.default)), False)
        if entry.path in self._left_out or _wrong(key, entry.value):
            return Setting(entry.path, None, True)  # the fault is known; nothing more is to be said of it
        return Setting(entry.path, _typed(key, entry.value), True)

    def put(self, path: str, value: Any, *settings: Setting, note: str = "") -> None:
        """Ours becomes `value`, because of `settings`. Nothing happens where that is None."""
        if value is None:
            return
        self.values[path] = value
        for setting in settings:
            if setting.path in self._left_out:
                continue
            line = f"{path}={shown(value)}"
            if setting.given:
                self.sources.setdefault(path, setting.path)
                ours = self._ours.setdefault(setting.path, [])
                if line not in ours:
                    ours.append(line)
                if note:
                    self._noted[setting.path] = note
            else:
                self._defaults.setdefault(setting.path, (setting.value, []))[1].append(line)

    def say(self, reason: str, *settings: Setting) -> None:
        """Why a key decides nothing, unless it does after all. What was said first stays."""
        for setting in settings:
            if setting.given:
                self._said.setdefault(setting.path, reason)

    def refuse(self, setting: Setting, reason: str) -> None:
        """A value that asks for what cannot be had."""
        if setting.path not in self._refused:
            self._refused.add(setting.path)
            self._said[setting.path] = reason
            self.faults.append(f"{setting.path}: {shown(setting.value)}: refused: {reason}")

    def decide(self, reason: str, *settings: Setting) -> None:
        """What the user has to look at or to add, with the keys that say it there."""
        self.advice.append(f"{', '.join(setting.path for setting in settings)}: {reason}")
        self._decided.update({setting.path: reason for setting in settings if setting.given})

    def at(self, path: str) -> Setting:
        """A key by its path, whatever its section."""
        return self.of(*self.table.place(path))

    def copy(self, facts: Mapping[str, Any]) -> None:
        """Every key of the table that is the same here, or has its values by name, where its facts hold."""
        for section, known in self.table.sections.items():
            for name, key in known.items():
                setting = self.of(section, name) if key.copy or key.values else None
                if setting is not None and any(facts.get(fact) != wanted for fact, wanted in key.when.items()):
                    self.say(key.otherwise, setting)
                elif setting is not None:
                    value = setting.value if key.copy else self.chosen(setting, key.values)
                    value = value if None in (value, key.least) else max(key.least, value)
                    for path in key.to:
                        self.put(f"{path}.{name}" if path.endswith("engine_args") else path, value, setting)

    def chosen(self, setting: Setting, values: Mapping[str, Any]) -> Any:
        """Ours for a value of theirs; None where there is none, which is refused."""
        if setting.value is not None and shown(setting.value) not in values:
            self.refuse(setting, f"must be one of {', '.join(values)}")
        return values.get(shown(setting.value))

    def rows(self) -> Iterator[TranslatedKey]:
        """One for each key of the file, in its order."""
        for entry in self._entries:
            path, value = entry.path, entry.value.text if isinstance(entry.value, Unresolved) else shown(entry.value)
            found = self.table.find(entry.section, entry.name)
            if path in self._left_out:
                yield TranslatedKey(path, value, "left out", reason="--without")
            elif found is not None:
                yield self._row(entry, value, *found)

    def _row(self, entry: FileEntry, value: str, place: str, key: TheirKey) -> TranslatedKey:
        path = entry.path
        ours, said = tuple(self._ours.get(path, ())), self._said.get(path, "")
        if path in self._refused:
            return TranslatedKey(path, value, "refused", reason=said)
        if path in self._decided:
            return TranslatedKey(path, value, "to decide", ours, self._decided[path])
        if ours:
            return TranslatedKey(path, value, "mapped", ours, self._noted.get(path, key.note))
        if key.refused or key.decide:
            return TranslatedKey(path, value, "ignored", reason=said or "off there too: it asks for nothing")
        reason = said or key.ignored or ("left empty" if entry.value is None else "")
        return TranslatedKey(path, value, "ignored", reason=reason or self._overridden(entry, place))

    def _overridden(self, entry: FileEntry, place: str) -> str:
        """Why a mapped key decided nothing: a section that is nearer to the role has it, or the role does not take it."""
        others = [each for each in self._entries if each.name == entry.name and each.path in self._ours]
        if others:
            return f"{others[-1].path} stands over it"
        return f"{entry.section} takes none of its own" if place not in (entry.section, "model") else "decides nothing here"

    def carried(self) -> list[Carried]:
        """The program's defaults among what was written, by key."""
        return [Carried(path, shown(value), tuple(dict.fromkeys(ours))) for path, (value, ours) in self._defaults.items()]


def _plain(name: str) -> str:
    return name.strip().replace("-", "_")


def _ends(path: str, name: str) -> bool:
    return path == name or path.endswith(f".{name}")


def _wrong(key: TheirKey, value: Any) -> bool:
    return isinstance(value, Unresolved) or bool(key.fault(value))


def _typed(key: TheirKey, value: Any) -> Any:
    """Whole numbers as int where the key's are, so that 4.0 is written as 4."""
    whole = key.type == "int" or (not key.type and type(key.default) is int)
    return int(value) if whole and isinstance(value, float) else value


def as_float(value: Any) -> float | None:
    """A number as ours has it, where theirs may be whole; None stays."""
    return None if value is None else float(value)
