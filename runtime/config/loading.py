"""Load a `Config` from a YAML file and overrides, with presets and derived defaults. One attempt shows all faults: one line
each, with its path in the file. msgspec's decoding stops at the first fault, so `mismatches` finds all faults before it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec
import yaml
from msgspec import inspect
from msgspec.structs import replace

from runtime import run_files
from runtime.cluster.topology import block_size
from runtime.config import Algorithm, Column, Config, Parallel, Section, Services
from runtime.config.model import TINY_PREFIX
from runtime.config.secret_values import refused
from runtime.config.yaml_text import at_home, dump, read_mapping, read_value, show
from runtime.errors import ConfigError

# Keys of TRL's GRPOConfig with other names here. By their letters another key of Sluice would be the nearest.
OF_TRL = {
    "beta": "algorithm.kl_coefficient",
    "epsilon": "algorithm.clip_low and algorithm.clip_high",
    "epsilon_high": "algorithm.clip_high",
    "eval_steps": "evaluation.every",
    "gradient_checkpointing": "services.trainer.activation_checkpointing",
    "loss_type": "algorithm.aggregation and algorithm.loss",
    "max_completion_length": "sampling.max_new_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_steps": "training.steps",
    "num_generations": "sampling.group_size",
    "num_iterations": "training.epochs",
    "output_dir": "run.dir",
    "peft_config": "lora",
    "per_device_train_batch_size": "training.groups_per_step",
    "report_to": "trackers",
    "resume_from_checkpoint": "run.resume",
    "reward_funcs": "rewards.rules",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "scale_rewards": "algorithm.group_std",
}


S = TypeVar("S", bound=Section)

_MINDSPEED = ("megatron_training", "actor_rollout_ref")  # sections of its two formats that ours lacks

# New names of keys of 0.2, by path, where `*` is a fleet. They leave with 0.4.
_RENAMED = {
    "publication": "weight_sync",
    "tune": "sft",
    "deadlines.silence": "keepalive",
    "deadlines.stall": "watchdog",
    "gateway.tools": "tool_format",
    "moe.replay": "router_replay",
    "reference.mode": "source",
    "services.rollout.slots": "max_num_seqs",
    "services.rollout.*.slots": "max_num_seqs",
    "services.rollout.tensor_parallel": "parallel.tensor",
    "services.rollout.*.tensor_parallel": "parallel.tensor",
}
# Keys of 0.2, by path, where `*` is a role, a fleet or a name: what to write now.
_REMOVED = {
    "metrics.names": "all trackers get the names of own (docs/metrics.md has MindSpeed-RL's beside them); leave the key out",
    "services.rollout.speculation": "replies are those of off, and no engine drafts tokens; leave the key out",
    "services.*.threads": "write env: {OMP_NUM_THREADS: 'NUMBER'}",
    "services.*.jemalloc": "write env: {LD_PRELOAD: LIBRARY}, with '' for none",
    "services.*.offload_train_optimizer": "write offload: [optimizer]",
    "services.*.offload_train_grad": "write offload: [grad]",
    "services.*.offload_train_param": "write offload: [param]",
    "services.*.overlap": "gradients are always summed during the backward pass, as true had it; leave the key out",
    "services.*.kv_for_waiting": "the embedded engine keeps 256 MiB; leave the key out",
    "services.reference.backend": "it follows from the devices, as auto had it; leave the key out",
    "gateway.max_body": "a request may have 8 MiB; leave the key out",
    "ledger.tick": "there is a transaction at most every 0.05 s; leave the key out",
    "ledger.segment_bytes": "a payload file has 64 MiB; leave the key out",
    "weight_sync.folder": "weights travel over the network or in memory; leave the key out",
    "weight_sync.full_every": "one version of 50 is sent whole; leave the key out",
    "weight_sync.senders": "every rank sends the parts that it holds; leave the key out",
    "weight_sync.abort_timeout": "members have 10 s to leave a group; leave the key out",
    "mismatch.keep_tokens": "each rank keeps 2048 tokens of a step; leave the key out",
    "network.hccl_host_ports": "write services.ROLE.env: {HCCL_HOST_SOCKET_PORT_RANGE: FIRST-LAST}",
    "network.hccl_npu_ports": "write services.ROLE.env: {HCCL_NPU_SOCKET_PORT_RANGE: FIRST-LAST}",
    "rewards.cpu_seconds": "half of rewards.timeout bounds the processor time; leave the key out",
    "services.environment.*.budgets.cleanup": "an agent has 10 s to clean up; leave the key out",
    "services.*.restarts.attempts": "write services.ROLE.restarts: NUMBER",
    "services.*.restarts.window": "restarts are counted within ten minutes; leave the key out",
    "services.*.restarts.backoff": "restarts come after 0.5 s, 1 s and so on, up to a minute; leave the key out",
    **{
        f"{section}.{role}_key": f"write columns: {{{role}: NAME}}"
        for section in ("data", "data.train.*", "evaluation.sets.*")
        for role in get_args(Column)
    },
    **{
        f"algorithm.{key}": f"write algorithm.{mapping}: {{{option}: VALUE}}"
        for mapping, options in {
            "loss_options": {
                "sapo_tau_positive": "tau_positive",
                "sapo_tau_negative": "tau_negative",
                "covariance_share": "share",
                "covariance_low": "low",
                "covariance_high": "high",
                "covariance_kl": "kl",
                "m2_threshold": "threshold",
                "behaviour_weight_cap": "weight_cap",
                "behaviour_weight_over": "weight_over",
            },
            "advantage_options": {"group_std_ddof": "ddof", "group_std_eps": "eps", "gae_whitened": "whitened"},
        }.items()
        for key, option in options.items()
    },
    "critic.optimizer": "write critic.learning_rate; all else is training.optimizer's",
    "training.optimizer.momentum": "Muon's is 0.95; leave the key out",
    "evaluation.min_p": "evaluations filter by top_p and top_k; leave the key out",
    "sft.optimizer": "write sft.learning_rate; all else is training.optimizer's",
    **{
        f"warmup.{key}": "follows from warmup.task; leave the key out"
        for key in (
            *("hidden_size", "layers", "heads", "kv_heads", "intermediate_size", "min_operand", "max_operand"),
            *("max_accuracy", "forgotten_carry", "learning_rate", "batch_size"),
        )
    },
}
_REPLACED = {("weight_sync.transport", "files"): "write auto"}  # what to write instead of a key's value of 0.2

_ROOT = inspect.type_info(Config)
# By key: the type of the section that the file fills, and the folder (configs/ in the source tree) with the named files.
_PRESETS = {
    "algorithm.preset": (inspect.type_info(Algorithm), Path(__file__).parent / "presets"),
    "services.preset": (inspect.type_info(Services), Path(__file__).parent / "layouts"),
    "services.platform": (inspect.type_info(Services), Path(__file__).parent / "envs"),
}


def load(path: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Read `path`, or take a file's content, apply `key.path=value` overrides, fill in presets and what layouts imply, decode.

    Raises ConfigError with all faults."""
    raw = dict(path) if isinstance(path, Mapping) else read_mapping(Path(path))
    if theirs := [section for section in _MINDSPEED if section in raw]:
        verls = "trainer" in raw  # whose files have actor_rollout_ref too
        whose, command = ("verl's", "import-verl") if verls else ("MindSpeed-RL's", "import-mindspeed")
        raise ConfigError([f"{path}: has {whose} section {theirs[0]}; sluice {command} makes a configuration of it"])
    raw, faults = _overridden(raw, overrides, _ROOT)
    faults += refused(raw.get("services"), "services")
    faults += mismatches(raw, _ROOT)
    for key in _PRESETS:
        faults += _fill_preset(raw, key)
    if faults:
        raise ConfigError(faults)
    for role in ("trainer", "critic", "reference"):
        section = raw.get("services", {}).get(role, {})
        if section.get("engine") == "megatron" and "processes" not in section:  # as many as the ranks of its layout
            parallel = msgspec.convert(section.get("parallel", {}), Parallel)
            section["processes"] = block_size(parallel) * (parallel.data or 1)
    if raw.get("services", {}).get("environment"):
        raw.setdefault("gateway", {})  # which its agents call
    return msgspec.convert(raw, Config)


def load_recorded(folder: Path) -> Config:
    """Read the configuration in a run's folder, which 0.2 may have written: renamed keys are read under their new names, and
    keys and values that no longer exist are left out. Raises ConfigError with every fault found."""
    return load(_known(read_mapping(folder / run_files.CONFIG), _ROOT))


def _known(value: Any, kind: inspect.Type, path: str = "") -> Any:
    """Return the parts of `value`, at `path`, that the type `kind` has."""
    for variant in _variants(kind):
        if isinstance(variant, inspect.ListType) and isinstance(value, list):
            return [_known(item, variant.item_type, f"{path}.{index}") for index, item in enumerate(value)]
        if isinstance(variant, inspect.DictType) and isinstance(value, dict):
            return {key: _known(item, variant.value_type, f"{path}.{key}") for key, item in value.items()}
        if isinstance(variant, inspect.StructType) and isinstance(value, dict):
            here, types = f"{path}." if path else "", {field.encode_name: field.type for field in variant.fields}
            renamed = [((_entry(_RENAMED, f"{here}{key}") or key).partition("."), item) for key, item in value.items()]
            named = {name: {inner: item} if inner else item for (name, _, inner), item in renamed}
            kept = {key: _known(item, types[key], here + key) for key, item in named.items() if key in types}
            return {key: item for key, item in kept.items() if not any(mismatches(item, types[key]))}
    return value


def load_other(path: str | Path, overrides: Sequence[str], kind: type[S], advice: Mapping[str, str]) -> S:
    """Read `path`, a file of the schema `kind` instead of a run's configuration, apply overrides, and decode.

    `advice`: what to do about keys that only other programs have. Raises ConfigError with all faults."""
    root = inspect.type_info(kind)
    needed = ", ".join(field.encode_name for field in _fields(root) if field.required)
    raw, faults = _overridden(read_mapping(Path(path), f"needed are {needed}"), overrides, root)
    faults += [f"{key}: {advice[key]}" for key in raw if key in advice]
    faults += mismatches({key: value for key, value in raw.items() if key not in advice}, root)
    if faults:
        raise ConfigError(faults)
    return msgspec.convert(raw, kind)


def resolve(config: Config) -> Config:
    """Fill the defaults that depend on other values. Idempotent: it runs again after a warm-up has named the model."""
    model, critic, data = config.model, config.critic, config.data
    (*several, only) = config.services.environment or [""]
    return replace(
        config,
        data=data if several or data.environment else replace(data, environment=only),
        run=replace(config.run, dir=config.run.dir or f"runs/{config.run.name}"),
        model=replace(model, reference=model.reference or model.path),
        critic=None if critic is None else replace(critic, path=critic.path or model.path),
        evaluation=replace(
            config.evaluation, max_new_tokens=config.evaluation.max_new_tokens or config.sampling.max_new_tokens
        ),
    )


def to_yaml(config: Config) -> str:
    """Return the whole configuration with defaults as YAML, which `load` reads as an equal configuration."""
    return dump(msgspec.to_builtins(config))


def type_faults(raw: Mapping[str, Any]) -> list[str]:
    """Return a line for each value of `raw`, a file's content, that does not match the schema. It begins with its path."""
    return list(mismatches(dict(raw), _ROOT))


def preset_names(key: str = "algorithm.preset") -> list[str]:
    """Return the names that `key` allows besides a path."""
    return sorted(path.stem for path in _PRESETS[key][1].glob("*.yaml"))


def _fill_preset(raw: dict[Any, Any], key: str) -> list[str]:
    """Fill a section with the missing values of the file that `key` names. Return the faults found instead."""
    kind, folder = _PRESETS[key]
    section, _, own_key = key.partition(".")
    given: Any = raw.get(section)
    name = given.get(own_key) if isinstance(given, dict) else None
    if not name or not isinstance(name, str) or _is_whole(given, kind):
        return []  # a file that leaves nothing out, as a run's folder keeps it, outlives its preset
    own = name.endswith((".yaml", ".yml"))
    path = Path(name) if own else folder / f"{name}.yaml"
    if not own and name not in preset_names(key):
        return [f"{key}: '{name}' is not one of {', '.join(preset_names(key))}, nor a path to FILE.yaml"]
    try:
        preset = at_home(read_mapping(path, f"at least one key of section {section} is needed"))
    except ConfigError as error:
        return [f"{key}: {fault}" for fault in error.faults]
    if own_key in preset:
        return [f"{key}: {path}: names a preset itself; they do not nest"]
    for chosen in ("loss", "advantage"):  # the options of another function than the preset's are no defaults
        if chosen in given and given[chosen] != preset.get(chosen):
            preset.pop(f"{chosen}_options", None)
    faults = [*refused(preset, section), *mismatches(preset, kind, "", _ROOT)]
    raw[section] = _filled(given, preset)
    return [f"{key}: {path}: {fault}" for fault in faults]


def _is_whole(given: object, kind: inspect.Type) -> bool:
    """Return whether the section `kind`, with its nested sections, has all keys."""
    return not isinstance(kind, inspect.StructType) or (
        isinstance(given, dict)
        and all(field.encode_name in given and _is_whole(given[field.encode_name], field.type) for field in kind.fields)
    )


def _filled(given: dict[Any, Any], preset: dict[Any, Any]) -> dict[Any, Any]:
    """Return `given` with the additional values of the preset, also within mappings that both have."""
    mappings = [key for key in given if isinstance(given[key], dict) and isinstance(preset.get(key), dict)]
    return preset | given | {key: _filled(given[key], preset[key]) for key in mappings}


def _spell_out(raw: dict[Any, Any]) -> list[str]:
    """Replace names by sections. Return the faults found instead. `model: tiny:FAMILY` is the model of policy and reference,
    and of critic and reward model if the run has them. `services: LAYOUT` is `services: {preset: LAYOUT}`."""
    services, model = raw.get("services"), raw.get("model")
    if isinstance(services, str):
        raw["services"] = {"preset": services}
    if isinstance(model, dict) and list(model) == ["tiny"]:  # what YAML makes of a colon with nothing, or a space, behind it
        model = f"{TINY_PREFIX} {model['tiny'] or ''}".strip()
    if not isinstance(model, str):
        return []
    from runtime.models import tiny_model

    raw["model"] = {"path": model}
    if tiny_model.described(model) is None:
        known = f"not a section of keys, nor one of {tiny_model.NAMES}"
        return [f"model: '{model}' is {known}; a folder is named by model.path"]
    rewards = raw.get("rewards")
    for section, path in ((raw.get("critic"), ""), (rewards.get("model") if isinstance(rewards, dict) else None, model)):
        if isinstance(section, dict) and "path" in section:
            section["path"] = path
    return []


def _overridden(raw: dict[Any, Any], overrides: Sequence[str], root: inspect.Type) -> tuple[dict[Any, Any], list[str]]:
    """Return `raw` with overrides and home directories applied, and the faults of overrides that cannot be applied."""
    faults = _spell_out(raw) if root is _ROOT else []
    for override in overrides:
        try:
            _apply(raw, override, root)
        except ConfigError as error:
            faults += error.faults
        faults += _spell_out(raw) if root is _ROOT else []
    return at_home(raw), faults


def _apply(raw: dict[Any, Any], override: str, root: inspect.Type) -> None:
    """Set one `key.path=value` in `raw`. Create missing sections; list items must exist. Raises ConfigError otherwise."""
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError([f"override '{key}': not of the form key.path=value"])
    try:
        value = read_value(text) if text.strip() else ""
    except yaml.YAMLError as error:
        raise ConfigError([f"override '{key}': the value is not valid YAML"]) from error
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
    """Return type and default, a new container, of the section or list `name` in `kind`; (None, {}) if the schema has none."""
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


def mismatches(value: object, kind: inspect.Type, path: str = "", root: inspect.Type | None = None) -> Iterator[str]:
    """Yield a line for each part of `value`, at `path`, that is not of type `kind`. `root` has the names to suggest."""
    root = root or kind
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
        if isinstance(value, str) and (now := _REPLACED.get((path, value))):
            yield f"{path}: {value} is no longer a value: {now}"
            return
        if isinstance(value, dict) and (gone := [(key, now) for key in value if (now := _replacement(f"{path}.{key}"))]):
            yield from (f"{path}.{key}: no longer a key: {now}" for key, now in gone)
            return
        yield _misfit(value, kind, path)


def _union_faults(value: object, kind: inspect.UnionType, path: str, root: inspect.Type) -> Iterator[str]:
    found = [list(mismatches(value, variant, path, root)) for variant in kind.types]
    if all(found):
        container = isinstance(value, (dict, list))  # of the right kind as a whole, whatever is wrong within
        meant = [each for variant, each in zip(kind.types, found, strict=True) if container and _is_plain(value, variant)]
        yield from meant[0] if meant else [_misfit(value, kind, path)]


def _misfit(value: object, kind: inspect.Type, path: str) -> str:
    is_text = any(isinstance(variant, inspect.StrType) for variant in _variants(kind))
    hint = "; put it in quotes" if is_text and isinstance(value, (bool, int, float)) else ""
    return f"{path}: {show(value)} is not {_wanted(kind)}{hint}"


def _struct_faults(value: dict[Any, Any], kind: inspect.StructType, path: str, root: inspect.Type) -> Iterator[str]:
    prefix = f"{path}." if path else ""
    known = {field.encode_name: field for field in kind.fields}
    for key, item in value.items():
        if key in known:
            yield from mismatches(item, known[key].type, prefix + key, root)
        elif now := _replacement(prefix + key):
            yield f"{prefix}{key}: no longer a key: {now}"
        else:
            yield f"{prefix}{key}: unknown key; {_nearest(str(key), list(known), root)}"
    for name, field in known.items():
        if field.required and name not in value:
            yield f"{prefix}{name}: missing; needs {_wanted(field.type)}"


def _replacement(path: str) -> str:
    """Return what to write instead of the removed key `path`; "" if no earlier version had it. The path may lack its section
    `services` or `algorithm`, as in the file of a preset."""
    for each in (path, f"services.{path}", f"algorithm.{path}"):
        if name := _entry(_RENAMED, each):
            return f"write {name}"
        if now := _entry(_REMOVED, each):
            return now
    return ""


def _entry(table: Mapping[str, str], path: str) -> str:
    return next((now for old, now in table.items() if fnmatchcase(path, old)), "")


def _nearest(key: str, names: list[str], root: inspect.Type) -> str:
    if key in OF_TRL:
        return f"TRL's {key} is {OF_TRL[key]} here"
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
    if isinstance(kind, inspect.LiteralType):
        return any(type(value) is type(allowed) and value == allowed for allowed in kind.values)
    if isinstance(kind, (inspect.IntType, inspect.FloatType)):
        if isinstance(value, bool) or not isinstance(value, int if isinstance(kind, inspect.IntType) else (int, float)):
            return False
        low = (kind.gt is None or value > kind.gt) and (kind.ge is None or value >= kind.ge)
        high = (kind.lt is None or value < kind.lt) and (kind.le is None or value <= kind.le)
        return low and high and (isinstance(kind, inspect.IntType) or math.isfinite(value))
    return _is_plain(value, kind)


def _is_plain(value: object, kind: inspect.Type) -> bool:
    """Return whether YAML gives such a value for `kind`, without a look into lists and mappings."""
    return isinstance(value, _PLAIN.get(type(kind), ((), ""))[0])


def _wanted(kind: inspect.Type) -> str:
    """Return `kind` in words, to follow "is not"."""
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
    return _PLAIN[type(kind)][1]


_PLAIN: dict[type[inspect.Type], tuple[type, str]] = {  # in Python, and in words
    inspect.BoolType: (bool, "true or false"),
    inspect.NoneType: (type(None), "null"),
    inspect.StrType: (str, "a string"),
    inspect.ListType: (list, "a list"),
    inspect.TupleType: (list, "a list"),
    inspect.DictType: (dict, "a mapping"),
    inspect.StructType: (dict, "a section of keys"),
}
