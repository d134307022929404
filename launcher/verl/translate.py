"""From verl's keys to a configuration of Sluice's, with a record of each: what `keys.yaml` does not cover."""

from __future__ import annotations

import ast
import math
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path, PurePath
from typing import Any

import yaml

from launcher.importing.keys import (
    FileEntry,
    KeyTable,
    Read,
    Setting,
    TranslatedSettings,
    Translation,
    Unresolved,
    given,
    scaled,
    translation,
)
from launcher.verl.script import TRAINERS, UNKNOWN, Script
from runtime.config.yaml_text import at_home, flat, read_mapping, read_value
from runtime.errors import ConfigError

# ---- Reading a file: YAML, the printout of verl's trainer, or a script that calls the trainer

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
    """Read `file`. A model that is named as on the Hub is a folder of `models`, if it is there. Raises ConfigError, one line
    per fault, each with the key's path in its file."""
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
    if printed.startswith("{'"):  # by pprint
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
    found = [("config_name", name) for name in names[:1]] + list(flat(raw))
    # Hydra's ??? marks a missing value.
    return {path: value for path, value in found if path.rpartition(".")[2] != "_target_" and value not in ({}, "???")}


def _resolved(path: str, value: Any, values: Mapping[str, Any], depth: int = _DEPTH) -> Any:
    """Return `value` with the values of other keys in place of `${...}`."""

    def named(found: re.Match[str]) -> Any:
        kind, name, default = found.groups()
        if kind == "oc.env:":
            return os.environ.get(name, default)
        whole = f"{path.rpartition('.')[0]}{name}" if name.startswith(".") else name
        known = TABLE.find(*TABLE.place(whole))
        if whole in values:
            return values[whole]
        if any(other.startswith(f"{whole}.") for other in values):
            return None  # a section: its keys are entries of their own
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


_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_WARMUPS = ("optim.lr_warmup_steps", "optim.lr_warmup_steps_ratio", "optim.min_lr_ratio")
_OF_OPTIMIZER = (
    *("grad_clip", "optim.optimizer", "optim.weight_decay", "optim.betas", "optim.clip_grad", "optim.min_lr"),
    *("optim.lr_scheduler_type", "optim.warmup_style", "optim.lr_decay_style", *_WARMUPS),
)
_DEVICES = ("nnodes", "n_gpus_per_node")
_SPREAD = {"tensor": "tensor_model", "pipeline": "pipeline_model", "data": "data"}  # their names of a rollout's parallelism
_TRACKERS = ("tensorboard", "wandb", "swanlab", "mlflow")
_MANAGERS = {"naive": "", "batch": "", "dapo": "acc_for_dapo"}


def translate(read: Read, without: Collection[str]) -> Translation:
    """Translate the keys. Raises ConfigError: a line for each key that is unknown, of a wrong type, or impossible in Sluice."""
    keys = TranslatedSettings(TABLE, read, without)
    facts = _facts(keys)
    keys.copy(facts)
    _run(keys)
    _data(keys)
    _rewards(keys)
    _algorithm(keys, facts)
    _steps(keys)
    _schedule(keys)
    if facts["gae"]:
        _critics_optimizer(keys)
    _services(keys, facts)
    return translation(keys, keys.advice)


def _facts(keys: TranslatedSettings) -> dict[str, Any]:
    """Return the facts that other keys depend on: `when` in the table."""
    engines = [keys.at(path) for path in ("model_engine", "config_name", f"{_ACTOR}.strategy")]
    named = [str(each.value) for each in engines]
    engine = "megatron" if any("megatron" in name for name in named) else "torch"
    keys.put("services.trainer.engine", engine, *given(*engines))
    if others := [each for each in engines if str(each.value) in ("veomni", "torchtitan", "automodel")]:
        keys.refuse(others[0], "must be fsdp, fsdp2 or megatron")
    gae = keys.at("algorithm.adv_estimator").value == "gae"
    keys.put("critic", {} if gae else None, keys.at("algorithm.adv_estimator"))
    in_loss, in_reward = keys.at(f"{_ACTOR}.use_kl_loss").value, keys.at("algorithm.use_kl_in_reward").value
    mode = keys.at("algorithm.rollout_correction.bypass_mode").value
    bypass = (keys.format != SYNCHRONOUS) if mode is None else mode
    ranks = {name: keys.at(f"actor_rollout_ref.model.{name}") for name in ("lora_rank", "lora.rank")}
    keys.put("lora", {} if any(rank.value for rank in ranks.values()) else None)
    name = keys.at(f"{_ROLLOUT}.name").value
    return {
        "engine": engine,
        "offload": engine if not keys.at(f"{_ACTOR}.fsdp_config.offload_policy").value else "",
        "tensor": engine == "megatron" and (keys.at(f"{_ACTOR}.megatron.tensor_model_parallel_size").value or 1) > 1,
        "gae": gae,
        "critic": engine if gae else "",
        "kl": "loss" if in_loss else "reward" if in_reward else "",
        "adaptive": bool(in_reward) and keys.at("algorithm.kl_ctrl.type").value == "adaptive",
        "loss": keys.at(f"{_ACTOR}.policy_loss.loss_mode").value,
        "by_sample": keys.at(f"{_ACTOR}.policy_loss.loss_mode").value in ("gspo", "geo_mean"),
        "bypass": bypass,
        "weights": bool(keys.at("algorithm.rollout_correction.rollout_is").value) and not bypass,
        "lora": next((each for each, rank in ranks.items() if rank.value), ""),
        "rollout": "" if name == "hf" else "vllm",
        "remote_code": keys.at("actor_rollout_ref.model.trust_remote_code").value,
    }


def _run(keys: TranslatedSettings) -> None:
    name, project, logger = keys.each("trainer", "experiment_name", "project_name", "logger")
    keys.put("run.name", str(name.value if name.given else keys.name).strip("_-").replace("/", "_"), name)
    path = keys.at("actor_rollout_ref.model.path")
    keys.put("model.path", path.value, path)
    if path.value is None:
        keys.advice.append("model.path is missing: name the Hugging Face folder of the model")
    elif not path.value.startswith(("/", ".")):
        keys.decide(
            f"{path.value} has to be a folder; where it is a name of the Hub, name what was downloaded, or use --models", path
        )
    trackers = [{"name": "jsonl"}] + [
        {"name": each} | ({} if each == "tensorboard" else {"project": project.value, "mode": "online"})
        for each in _listed(logger)
        if each in _TRACKERS
    ]
    keys.put("trackers", trackers, *given(logger, project))


def _data(keys: TranslatedSettings) -> None:
    train, held_out = keys.at("data.train_files"), keys.at("data.val_files")
    files, problems = _listed(train), _listed(held_out)
    if files:
        keys.put("data.train", [{"path": path} for path in files] if len(files) > 1 else files[0], train)
        keys.put("data.handler", "math17k", train)
    if len(problems) == 1:
        keys.put("data.eval", problems[0], held_out)
    elif problems:
        names = [f"{PurePath(path).parent.name}_{PurePath(path).stem}" for path in problems]
        sets = [{"name": name, "path": path} for name, path in zip(names, problems, strict=True)]
        keys.put("evaluation.sets", sets, held_out)


def _listed(setting: Setting) -> list[Any]:
    return setting.value if isinstance(setting.value, list) else [setting.value] if setting.value else []


def _rewards(keys: TranslatedSettings) -> None:
    manager, older = keys.at("reward.reward_manager.name"), keys.at("reward_model.reward_manager")
    chosen = older if older.given else manager
    files = str(keys.values.get("data.train", ""))
    rule = _MANAGERS.get(chosen.value) or ("gsm8k" if "gsm8k" in files and "math" not in files else "math")
    keys.put("rewards.rules", [{"name": rule}], chosen)
    reason = "verl chooses by each row's data_source, or by a function of its own: look whether this rule is meant"
    keys.decide(f"rewards.rules is {rule}: {reason} (docs/guides/rewards.md)", chosen)
    for own in (keys.at("reward.custom_reward_function.path"), keys.at("custom_reward_function.path")):
        keys.put("data.additional_keys", ["data_source", "extra_info"] if own.value else None, own)
    for section, path in {"reward.reward_model": "model_path", "reward_model": "model.path"}.items():
        enabled, model = keys.each(section, "enable", path)
        if enabled.value:  # the model alone scores there; the rule judges replies in evaluations
            keys.put("rewards.model.path", model.value or "", model, enabled)
            keys.put("rewards.rules", [{"name": rule, "weight": 0.0}], chosen)
    reply = keys.values.get("sampling.max_new_tokens") or 1
    for prefix in (
        "reward.reward_kwargs.overlong_buffer_cfg",
        "reward_model.reward_kwargs.overlong_buffer_cfg",
        "reward_model.overlong_buffer",
    ):
        enabled, length, factor = keys.each(prefix, "enable", "len", "penalty_factor")
        if enabled.value and length.value:
            keys.put("algorithm.overlong_buffer", length.value / reply, length, enabled)
            keys.put("algorithm.overlong_penalty", factor.value, factor)


def _algorithm(keys: TranslatedSettings, facts: dict[str, Any]) -> None:
    if facts["gae"]:
        own, path = keys.at("critic.model.path"), keys.at("actor_rollout_ref.model.path")
        keys.put("critic.path", own.value if own.value != path.value else None, own)
    if facts["by_sample"]:
        keys.put("algorithm.aggregation", "seq_mean_token_mean", keys.at(f"{_ACTOR}.policy_loss.loss_mode"))
    both = keys.at(f"{_ACTOR}.clip_ratio")
    for side in ("low", "high"):
        if both.given and not keys.at(f"{_ACTOR}.clip_ratio_{side}").given:  # null, or a version that has none
            keys.put(f"algorithm.clip_{side}", both.value, both)
    loss, reward = keys.at(f"{_ACTOR}.use_kl_loss"), keys.at("algorithm.use_kl_in_reward")
    if loss.value and reward.value:
        keys.refuse(reward, "there is one KL term, and use_kl_loss is on too; must be false where that is true")
    keys.put("algorithm.kl_placement", facts["kl"] or None, *(each for each in (loss, reward) if each.value))
    limit = keys.at("algorithm.filter_groups.max_num_gen_batches")
    keys.put("algorithm.dynamic_sampling_limit", limit.value or None, limit)


def _steps(keys: TranslatedSettings) -> None:
    batch, mini = keys.at("data.train_batch_size"), keys.at(f"{_ACTOR}.ppo_mini_batch_size")
    groups, deciding = batch.value, [batch]
    staleness, partial = _staleness(keys)
    if keys.format == FULLY:
        required, trigger = keys.at("async_training.require_batches"), keys.at("async_training.trigger_parameter_sync_step")
        groups = (mini.value or 1) * (required.value or 1) * (trigger.value or 1)
        deciding = [mini, required, trigger]
    keys.put("training.groups_per_step", groups, *deciding)
    if mini.value and groups and groups % mini.value:
        keys.faults.append(f"{mini.path}: {mini.value}: does not divide the {groups} prompts of a step ({batch.path})")
    keys.put("training.mini_batch_size", 0 if mini.value == groups else mini.value, mini)
    versions = math.ceil(staleness.value) if isinstance(staleness.value, (int, float)) else partial
    keys.put("training.staleness", versions, staleness)
    if partial:
        keys.put("training.partial_rollouts", True, staleness)
    if versions:
        keys.put("training.lr_staleness_power", 0.0, staleness)  # verl lowers no rate with staleness
    steps, epochs = keys.each("trainer", "total_training_steps", "total_epochs")
    prompts = keys.at("rollout.total_rollout_steps")
    if prompts.value and groups:
        keys.put("training.steps", max(1, prompts.value // groups), prompts)
    keys.put("training.steps", steps.value, steps)
    if "training.steps" not in keys.values and not epochs.given:
        keys.advice.append(f"training.steps is 1000, Sluice's own: {epochs.path} is {epochs.value} there, passes over the data")
    frequency = keys.at("trainer.test_freq")
    keys.put("evaluation.after", (frequency.value or 0) > 0, frequency)


def _staleness(keys: TranslatedSettings) -> tuple[Setting, int]:
    """Return the setting that bounds samples' age in versions, and 1 if rollouts that take turns go on with their samples."""
    mode, most = keys.each("trainer.v1", "trainer_mode", "sampler.max_off_policy_threshold")
    if mode.value not in (None, "sync", "colocate_async", "separate_async"):
        keys.refuse(mode, "must be sync, colocate_async or separate_async")
    if mode.value == "separate_async":
        keys.put("training.staleness", most.value, mode)
        return most, 0
    if keys.format == FULLY:
        return keys.at("async_training.staleness_threshold"), 0
    if keys.format == ONE_STEP:
        return Setting("one_step_off_policy", 1, False), 0
    return mode, int(mode.value == "colocate_async")


def _schedule(keys: TranslatedSettings) -> None:
    path = "training.optimizer"
    count, share, least = keys.each(_ACTOR, *_WARMUPS)
    steps, rate = keys.values.get("training.steps"), keys.values.get(f"{path}.learning_rate")
    if count.value is not None and count.value >= 0:
        keys.put(f"{path}.warmup_steps", count.value, count)
    elif share.value and steps:
        keys.put(f"{path}.warmup_steps", round(share.value * steps), share)
    elif share.value:
        keys.decide(f"{path}.warmup_steps is {share.value:g} of training.steps, which have to be written first", share)
    if least.value and rate:
        keys.put(f"{path}.min_learning_rate", least.value * rate, least)


def _critics_optimizer(keys: TranslatedSettings) -> None:
    """Report each setting of the critic's optimizer that differs from the policy's, which is for both here."""
    rates = [keys.at(f"{section}.optim.lr").value for section in (_ACTOR, "critic")]
    for name in _OF_OPTIMIZER:
        policys = keys.at(f"{_ACTOR}.{name}").value
        keys.not_of_critic(keys.at(f"critic.{name}"), scaled(policys, *rates) if name == "optim.min_lr" else policys)


def _services(keys: TranslatedSettings, facts: dict[str, Any]) -> None:
    counted = keys.each("trainer", *_DEVICES)
    devices = _product(counted)
    apart = keys.format != SYNCHRONOUS or keys.at("trainer.v1.trainer_mode").value == "separate_async"
    parallel = keys.each("actor_rollout_ref.rollout", *(f"{name}_parallel_size" for name in _SPREAD.values()))
    if facts["rollout"]:
        for name, setting in zip(_SPREAD, parallel, strict=True):
            keys.put(f"services.rollout.parallel.{name}", setting.value or 1, setting)
    ways = math.prod(setting.value or 1 for setting in parallel)
    own = keys.each("rollout" if keys.format != SYNCHRONOUS else _ROLLOUT, *_DEVICES) if apart else counted
    sampling = _product(own)
    if sampling is not None and (sampling < ways or sampling % ways):
        keys.faults.append(f"{parallel[0].path}: {ways}: does not divide the {sampling} devices of the rollouts")
    elif sampling is not None:
        keys.put("services.rollout.replicas", sampling // ways, *own, *parallel)
    _roles(keys, facts, devices, counted, apart)
    if (counted[0].value or 1) > 1:
        what = "cluster.min_nodes, services.coordinator.host and port, and network.interface"
        keys.decide(f"several machines want {what} (docs/guides/cluster.md)", counted[0])
    _budgets(keys, facts)


def _product(counted: list[Setting]) -> int | None:
    """Return the number of devices; None if a count is left out."""
    return None if None in (counted[0].value, counted[1].value) else counted[0].value * counted[1].value


def _roles(keys: TranslatedSettings, facts: dict[str, Any], devices: int | None, counted: list[Setting], apart: bool) -> None:
    names = ("tensor", "pipeline", "context", "expert")
    ways = {name: keys.values.get(f"services.trainer.parallel.{name}", 1) for name in names}
    if min(1 if devices is None else devices, *ways.values()) < 1:
        devices, ways = devices or None, dict.fromkeys(ways, 1)  # the schema's own check reports these
    block = ways["tensor"] * ways["pipeline"] * ways["context"]
    update = keys.values.get("training.mini_batch_size") or keys.values.get("training.groups_per_step")
    if devices is not None and (devices % block or (update and update % (devices // block))):
        blocks = f"{devices} devices in blocks of {block}"
        keys.refuse(counted[1], f"{blocks} cannot share out the {update} prompts of an update; their number must divide it")
    keys.put("services.trainer.processes", devices, *counted)
    if not apart:
        keys.put("services.rollout.colocate", "trainer", *counted)
    experts = keys.at(f"{_ACTOR}.megatron.expert_model_parallel_size")
    if devices is not None and devices // (ways["tensor"] * ways["pipeline"]) % ways["expert"]:
        held = f"{devices // (ways['tensor'] * ways['pipeline'])} ranks that hold the same part"
        keys.refuse(experts, f"experts are cut by tensor parallelism as well; must divide the {held}")
    if facts["gae"]:
        for name, value in {"engine": facts["engine"], "processes": devices, "colocate": "trainer"}.items():
            keys.put(f"services.critic.{name}", value)
        if keys.values.get("services.critic.parallel.tensor", 1) > 1:
            keys.put("services.critic.parallel.sequence", True)
    reference: dict[str, Any] = {"replicas": devices}
    if facts["engine"] == "megatron":
        sequence = keys.values.get("services.trainer.parallel.sequence")
        spread = {f"parallel.{name}": ways[name] for name in ("tensor", "pipeline", "expert")}
        reference = {"engine": "megatron", "processes": devices, **spread, "parallel.sequence": sequence}
    for name, value in (reference | {"colocate": "trainer"}).items() if facts["kl"] else ():
        keys.put(f"services.reference.{name}", value)
    modules = keys.at("actor_rollout_ref.model.target_modules")
    if facts["lora"]:
        keys.put("lora.target_modules", [name for name in _listed(modules) if name != "all-linear"], modules)


def _budgets(keys: TranslatedSettings, facts: dict[str, Any]) -> None:
    """Translate the tokens of a pass: with use_dynamic_bsz as they are, else that many samples of the greatest length."""
    longest = keys.values.get("data.max_prompt_tokens", 0) + keys.values.get("sampling.max_new_tokens", 0)
    dynamic = keys.at(f"{_ACTOR}.use_dynamic_bsz")
    budgets = {"training.max_tokens_per_microbatch": f"{_ACTOR}.ppo"}
    if facts["kl"]:
        budgets["services.reference.max_tokens_per_microbatch"] = "actor_rollout_ref.ref.log_prob"
    for path, prefix in budgets.items():
        tokens, samples = keys.at(f"{prefix}_max_token_len_per_gpu"), keys.at(f"{prefix}_micro_batch_size_per_gpu")
        own = dynamic if prefix.startswith(_ACTOR) else keys.at(f"{prefix}_use_dynamic_bsz")
        flag = own if own.value is not None else dynamic
        if flag.value and tokens.value:
            keys.put(path, max(tokens.value, longest), tokens, *given(own))
        elif samples.value:
            keys.put(path, samples.value * longest, samples)
