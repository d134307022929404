"""From MindSpeed-RL's files to one flat list of keys and values: the file itself, and the models' files that it names. The
format is the current one, or the older one of R1-Zero: the file's sections decide. Names may have dashes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from launcher.importing.keys import FileEntry, KeyTable, Read, Setting, TranslatedSettings, shown
from runtime.config.yaml_text import read_mapping
from runtime.errors import ConfigError

# ---- The table in `keys.yaml`, and the sections of each role

_SHARED = {"current": "megatron_training", "r1_zero": "training"}  # by format: the section with the keys of all roles
_CURRENT_ROLES = {"actor": "actor_config", "reference": "ref_config", "critic": "critic_config", "reward": "reward_config"}
_OLDER_ACTOR, _OLDER_REFERENCE = "actor_rollout_ref.actor_rollout", "actor_rollout_ref.ref"
_OLDER_ROLES = {"actor": _OLDER_ACTOR, "reference": _OLDER_REFERENCE, "critic": "critic", "reward": "reward"}
_OWN = {"current": _CURRENT_ROLES, "r1_zero": _OLDER_ROLES}  # and each role's own, which overrides the first one
# For a section of a file: the sections of the table in which its keys are looked up, in order. Default: its own.
_PLACES = {
    **dict.fromkeys(("model", "training", "vit_config"), ("megatron_training",)),
    **{section: (section, "megatron_training") for section in _CURRENT_ROLES.values()},
    **{older: (older, _CURRENT_ROLES[role], "megatron_training") for role, older in _OLDER_ROLES.items()},
    _OLDER_ACTOR: (_OLDER_ACTOR, "megatron_training"),
}
# Sections of the older format. Some have the names of ours.
_OLDER_SECTIONS = (*_OLDER_ROLES.values(), "algorithm", "resource_pool")
_ROLES = {"megatron_training": "actor", _OLDER_ACTOR: "actor", "critic": "critic"}
TABLE = KeyTable("MindSpeed-RL", "import-mindspeed", Path(__file__).parent / "keys.yaml", _PLACES)


def named_there(path: str) -> list[str]:
    """Return the keys of MindSpeed-RL's current format, as SECTION.KEY, that decide our key `path`."""
    sections = {section: keys for section, keys in TABLE.sections.items() if section not in _OLDER_SECTIONS}
    return [f"{section}.{name}" for section, keys in sections.items() for name, key in keys.items() if path in key.to]


# ---- MindSpeed-RL's keys by role


class RoleSettings(TranslatedSettings):
    """Keys of a section, and keys of a role, which several sections may have."""

    def __init__(self, read: Read, without: Collection[str]):
        super().__init__(TABLE, read, without)
        self.rl = read.format == "current"
        self._by_model = {(each.model, each.name): each for each in read.entries if each.model}

    def has(self, section: str) -> bool:
        return section == "megatron_training" or (section in _OLDER_SECTIONS) is not self.rl

    def of(self, section: str, name: str) -> Setting:
        """Return a key of a section; of a role, if the section is one's: those of megatron_training are the actor's."""
        role = _ROLES.get(section)
        return super().of(section, name) if role is None else self.role(role, name)

    def either(self, current: str, older: str) -> Setting:
        """Return a key by its path in the file's format."""
        return self.at(current if self.rl else older)

    def summed(self, pool: Setting) -> int | None:
        """Return the devices of all nodes; None if they are not given, or at fault."""
        if pool.value is not None and any(type(each) is not int or each < 0 for each in pool.value):
            self.faults.append(f"{pool.path}: {pool.value}: is not a list of numbers of devices")
            return None
        return None if pool.value is None else sum(pool.value)

    def role(self, role: str, name: str) -> Setting:
        """Return a key of a role: from its own section, else from that of all roles, else from its model, else the default."""
        shared, own = _SHARED[self.format], _OWN[self.format][role]
        named = [self._by_place.get((section, "model")) for section in (own, shared)]
        model = next((each.value for each in named if each is not None), "")
        chosen = [self._by_place.get((own, name)), self._by_place.get((shared, name)), self._by_model.get((model, name))]
        return self.setting(next((each for each in chosen if each is not None), None), own, name)


_CURRENT = ("megatron_training", "actor_config", "rl_config", "generate_config")
_OLDER = ("training", "actor_rollout_ref", "algorithm", "resource_pool")
_OTHERS = ("ref", "reward", "critic", "vit", "profiler", "msprobe")
_FORMS = {"current": (*_CURRENT, *(f"{name}_config" for name in _OTHERS)), "r1_zero": (*_OLDER, "critic", "reward")}
_PARTS = {"actor_rollout_ref": ("actor_rollout", "ref")}


def read(file: Path, models: Path | None = None) -> Read:
    """Read `file`, and the models that it names, from the folder `models`; None is the folder `model` beside the file. Raises
    ConfigError, one line per fault, each with the key's path in its file."""
    faults: list[str] = []
    raw = _underscored(read_mapping(file, "MindSpeed-RL's sections are needed"), "", faults)
    format, before = _format(file, raw), len(faults)
    chosen = _models(raw, models or file.parent / "model", faults)
    named = len(faults) == before
    entries: list[FileEntry] = []
    for section, content in _sections(raw, format, faults):
        entries += _entries(section, content, faults)
    if not entries and not faults:
        faults.append("its sections have no keys")
    for name, content in chosen.items():
        entries += [FileEntry("model", key, value, model=name) for key, value in content.items()]
    faults += _model_names(entries, chosen) if named else []
    for each in entries:
        if isinstance(each.value, str) and "${" in each.value:  # Hydra would put another value in its place
            faults.append(f"{each.path}: {each.value}: is not resolved here; write the value")
    if faults:
        raise ConfigError([f"{file}: {fault}" for fault in faults])
    return Read(name=file.stem, format=format, entries=tuple(entries))


def _format(file: Path, raw: Mapping[str, Any]) -> str:
    if {"input", "output_prefix"} <= raw.keys():
        raise ConfigError([f"{file}: is a file of preprocess_data, not of training; sluice data prepare has one of its own"])
    if isinstance(raw.get("run"), dict):
        raise ConfigError([f"{file}: is a configuration of Sluice's own, with a section run; sluice validate reads it"])
    current, older = ([section for section in sections if section in raw] for sections in (_CURRENT, _OLDER))
    if current and older:
        raise ConfigError([f"{file}: has sections of both formats, {current[0]} and {older[0]}; must be one of them"])
    if not current and not older:
        both = f"MindSpeed-RL's sections ({', '.join(_CURRENT)}) nor the older ones ({', '.join(_OLDER)})"
        raise ConfigError([f"{file}: has neither {both}"])
    return "current" if current else "r1_zero"


def _underscored(raw: Mapping[Any, Any], path: str, faults: list[str]) -> dict[str, Any]:
    """Return `raw` with underscores in all names of keys, except in values that are mappings by nature."""
    made: dict[str, Any] = {}
    for given, value in raw.items():
        name = str(given).replace("-", "_")
        if name in made:
            faults.append(f"{path}{name}: occurs twice, with dashes and with underscores")
        nested = isinstance(value, dict) and name not in ("map_keys", "model")
        made[name] = _underscored(value, f"{path}{name}.", faults) if nested else value
    return made


def _sections(raw: Mapping[str, Any], format: str, faults: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the sections of a file, and those within a section, by the names that the table has for them."""
    inner = dict[str, Any]()
    for name, content in raw.items():
        if name in _PARTS and isinstance(content, dict):
            inner |= {f"{name}.{part}": each for part, each in content.items()}
        elif name not in ("defaults", "hydra", "model"):
            inner[name] = content
    known = (*_FORMS[format], _OLDER_ACTOR, _OLDER_REFERENCE)
    for name, content in inner.items():
        if name not in known:
            whole = name.rpartition(".")[0]
            near = get_close_matches(name, known, n=1) if not whole else []
            hint = f"nearest is {near[0]}" if near else f"allowed are {', '.join(_PARTS.get(whole, _FORMS[format]))}"
            faults.append(f"{name}: unknown section; {hint}")
        elif isinstance(content, dict):
            yield name, content
        elif content is not None:
            faults.append(f"{name}: {shown(content)} is not a section of keys")


def _entries(section: str, content: Mapping[str, Any], faults: list[str]) -> Iterator[FileEntry]:
    """Yield the keys of a section, and those of a mapping whose keys the table knows."""
    known = TABLE.names(section)
    for name, value in content.items():
        inner = any(key.startswith(f"{name}.") for key in known)
        if inner and isinstance(value, dict):
            yield from (FileEntry(section, f"{name}.{key}", each) for key, each in value.items())
        elif inner and value is not None:
            faults.append(f"{section}.{name}: {shown(value)} is not a mapping")
        elif not inner:
            yield FileEntry(section, name, value)


def _models(raw: Mapping[str, Any], folder: Path, faults: list[str]) -> dict[str, dict[str, Any]]:
    """Return the models that `defaults` names, by name."""
    found: dict[str, dict[str, Any]] = {}
    listed = raw.get("defaults") or []
    if not isinstance(listed, list):
        faults.append(f"defaults: {shown(listed)} is not a list")
        return {}
    for item in listed:
        if item == "_self_":
            continue
        if isinstance(item, str) and item.startswith("model/"):
            item = {"model": item.removeprefix("model/")}
        if not isinstance(item, dict) or set(item) != {"model"}:
            faults.append(f"defaults: {shown(item)}: only `- model: NAME` and _self_ are read")
            continue
        names = item["model"] if isinstance(item["model"], list) else [item["model"]]
        for name in map(str, names):
            path = folder / f"{name}.yaml"
            if not path.is_file():
                faults.append(f"defaults: model {name}: there is no {path}; --models names the folder that has it")
                continue
            found[name] = {}
            try:
                content = read_mapping(path, f"a section {name} is needed").get(name)
            except ConfigError as error:
                faults += error.faults
                continue
            if isinstance(content, dict):
                found[name] = _underscored(content, f"{name}.", faults)
            else:
                faults.append(f"{path}: has no section {name}")
    return found


def _model_names(entries: list[FileEntry], models: Mapping[str, Any]) -> Iterator[str]:
    """Yield a fault for each role whose `model` is not among those that were read."""
    for entry in entries:
        named = isinstance(entry.value, str) and entry.value in models
        if entry.name == "model" and not entry.model and not named:
            which = f"those are {', '.join(models)}" if models else "it names none"
            yield f"{entry.path}: {shown(entry.value)} is no model of `defaults`; {which}"
