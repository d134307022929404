"""From MindSpeed-RL's keys to a configuration of Sluice's, with a record of what became of each. Pure."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path, PurePath
from typing import Any

from launcher.importing.keys import Read, Setting, Translation, check, given, scaled, translation
from launcher.mindspeed import algorithm, layout
from launcher.mindspeed.reading import TABLE as TABLE
from launcher.mindspeed.reading import RoleSettings, read
from runtime.data.prepare import LABELS

_DATA_FILES = (".json", ".jsonl", ".parquet", ".arrow")
_HANDLERS = {
    "AlpacaStyleInstructionHandler": "alpaca",
    "R1AlpacaStyleInstructionHandler": "r1",
    "Math17kAlpacaStyleInstructionHandler": "math17k",
}
_COLUMNS = {"prompt": "prompt", "query": "query", "response": "label", "system": "system"}
_OF_OPTIMIZER = ("min_lr", "lr_decay_style", "lr_warmup_fraction", "adam_beta1", "adam_beta2", "weight_decay", "clip_grad")
_SWANLAB_MODES = dict.fromkeys(("", "cloud", "online"), "online") | dict.fromkeys(("local", "offline"), "offline")
_SWANLAB_MODES["disabled"] = "disabled"


def imported(file: Path, models: Path | None, without: Collection[str]) -> Translation:
    """Return the translation of `file`, with models from the folder `models`. Raises ConfigError, a line for each fault."""
    return translate(read(file, models), without)


def translate(read: Read, without: Collection[str] = ()) -> Translation:
    """Translate the keys. Raises ConfigError: a line for each key that is unknown, of a wrong type, or impossible in Sluice."""
    settings = RoleSettings(read, without)
    facts = algorithm.facts(settings)
    settings.copy(facts)
    _run(settings)
    _data(settings)
    _lengths(settings)
    algorithm.rewards(settings)
    algorithm.algorithm(settings, facts)
    _training(settings, facts["dapo"])
    layout.services(settings)
    _trackers(settings)
    check(settings)
    return translation(settings, _advice(settings))


def _run(keys: RoleSettings) -> None:
    keys.put("run.name", keys.name)
    folder, load = keys.role("actor", "tokenizer_name_or_path"), keys.role("actor", "load")
    keys.put("model.path", folder.value, load)


def _data(keys: RoleSettings) -> None:
    path = keys.role("actor", "data_path")
    if path.value is not None:
        keys.put("data.train", _prepared(keys, path), path)
    additional = keys.role("actor", "dataset_additional_keys")
    if additional.given:
        keys.put("data.additional_keys", [name for name in additional.value or () if name != LABELS], additional)
    handler, columns = keys.role("actor", "handler_name"), keys.role("actor", "map_keys")
    if handler.value is not None and handler.value not in _HANDLERS:
        keys.refuse(handler, f"must be one of {', '.join(_HANDLERS)}; write another one as FILE.py:NAME in data.handler")
    keys.put("data.handler", _HANDLERS.get(handler.value), handler)
    for name, column in (columns.value or {}).items():
        if name not in _COLUMNS:
            keys.faults.append(f"{columns.path}.{name}: unknown key; allowed are {', '.join(_COLUMNS)}")
        else:
            keys.put(f"data.columns.{_COLUMNS[name]}", column, columns)


def _prepared(keys: RoleSettings, setting: Setting) -> str | list[dict[str, Any]]:
    """Return what `sluice data prepare` writes for theirs: for one prefix, or for several with a weight before each."""
    listed = isinstance(setting.value, list)
    parts = [str(part).strip() for part in (setting.value if listed else str(setting.value).split(","))]
    parts = list(filter(None, parts))
    if len(parts) < 2:
        return _file(parts[0] if parts else "")
    if not _weights(parts) and listed:
        return [{"path": _file(part)} for part in parts]
    if not _weights(parts):
        keys.faults.append(f"{setting.path}: {setting.value}: is not WEIGHT,PREFIX,WEIGHT,PREFIX,...")
        return ""
    return [{"path": _file(path), "weight": float(weight)} for weight, path in zip(parts[::2], parts[1::2], strict=True)]


def _weights(parts: list[str]) -> bool:
    """Return whether every other part, beginning with the first, is a number above 0."""
    try:
        return len(parts) % 2 == 0 and all(float(part) > 0 for part in parts[::2])
    except ValueError:
        return False


def _file(prefix: str) -> str:
    return prefix if not prefix or PurePath(prefix).suffix in _DATA_FILES else f"{prefix}.parquet"


def _lengths(keys: RoleSettings) -> None:
    rl, prompt = keys.rl, keys.either("rl_config.max_prompt_length", "actor_rollout_ref.actor_rollout.max_prompt_length")
    both, reply = keys.role("actor", "seq_length"), keys.of("generate_config", "sampling_config.max_tokens")
    if rl and reply.given:
        keys.put("sampling.max_new_tokens", reply.value, reply)
    elif both.value is not None and prompt.value is not None:
        if both.value <= prompt.value:
            how = "; or sampling_config.max_tokens has to say how long a reply may be" if rl else ""
            keys.faults.append(
                f"{both.path}: {both.value}: leaves no room for a reply behind max_prompt_length {prompt.value}{how}"
            )
        else:
            keys.put("sampling.max_new_tokens", both.value - prompt.value, both, prompt)
    elif rl:
        keys.put("sampling.max_new_tokens", reply.value, reply)
    else:
        missing = " and ".join(each.path for each in (both, prompt) if each.value is None)
        keys.advice.append(f"{missing} is missing: the lengths of prompts and replies are Sluice's own where none is written")


def _training(keys: RoleSettings, dapo: bool) -> None:
    blocking = keys.of("rl_config", "blocking")
    deciding = [blocking] if keys.rl and blocking.value is not None else []
    split = keys.of("rl_config", "partial_rollout_max_split")
    if further := max(0, (split.value or 1) - 1):
        deciding.append(split)
        if keys.rl:  # r1_zero's rollouts have devices of their own
            keys.put("training.partial_rollouts", True, split)
    keys.put("training.staleness", further, *deciding)
    batch = keys.role("actor", "global_batch_size")
    filtered, kept = keys.each("rl_config", "filter_groups_enable", "filter_groups_train_batch_size")
    batch = kept if keys.rl and dapo and filtered.value and kept.given else batch
    keys.put("training.groups_per_step", batch.value, batch)
    mini = keys.either("rl_config.mini_batch_size", "actor_rollout_ref.actor_rollout.ppo_mini_batch_size")
    if mini.given and mini.value is not None and batch.value:
        _mini_batch(keys, mini, batch.value)
    _optimizer(keys)
    if "critic" in keys.values:
        _critics_optimizer(keys)


def _mini_batch(keys: RoleSettings, mini: Setting, batch: int) -> None:
    samples = keys.values.get("sampling.group_size") or 1
    prompts, note = mini.value, ""
    if prompts > batch:
        fewer = prompts // samples  # in older versions it counted samples
        if not keys.rl and prompts % samples == 0 and fewer < batch and batch % fewer == 0:
            prompts, note = fewer, f"more than a step has prompts, so samples: {fewer} prompts"
        else:
            prompts, note = batch, f"more than the {batch} prompts of a step: one update, as there"
    if prompts < 1 or batch % prompts:
        keys.faults.append(f"{mini.path}: {mini.value}: does not divide the {batch} prompts of a step")
        return
    whole = prompts == batch
    note = note or ("prompts of one update: all of a step, which is 0 here" if whole else "")
    keys.put("training.mini_batch_size", 0 if whole else prompts, mini, note=note)


def _critics_optimizer(keys: RoleSettings) -> None:
    """Report what the critic's optimizer has otherwise than the policy's, which it shares here."""
    rate, policys_rate = keys.role("critic", "lr"), keys.role("actor", "lr")
    keys.put("critic.learning_rate", rate.value, rate)
    for name in _OF_OPTIMIZER:
        own, policys = keys.role("critic", name), keys.role("actor", name).value
        keys.not_of_critic(own, scaled(policys, policys_rate.value, rate.value) if name == "min_lr" else policys)


def _optimizer(keys: RoleSettings) -> None:
    path = "training.optimizer"
    warmup, steps = keys.role("actor", "lr_warmup_fraction"), keys.role("actor", "train_iters")
    if warmup.value is not None and steps.value is not None:
        keys.put(f"{path}.warmup_steps", round(warmup.value * steps.value), warmup)
    betas = [keys.role("actor", f"adam_beta{index}") for index in (1, 2)]
    if None not in (values := [beta.value for beta in betas]):
        keys.put(f"{path}.betas", values, *betas)


def _trackers(keys: RoleSettings) -> None:
    if not keys.rl:
        return
    board, wandb, swanlab = (keys.of("rl_config", f"use_{name}") for name in ("tensorboard", "wandb", "swanlab"))
    trackers: list[dict[str, Any]] = [{"name": "jsonl"}]
    if board.value or not board.given:
        trackers.append({"name": "tensorboard"})
    deciding = [each for each in (board, wandb, swanlab) if each.given and each.value is not None]
    for flag, name in ((wandb, "wandb"), (swanlab, "swanlab")):
        project = keys.of("rl_config", f"{name}_project")
        if not flag.value:
            continue
        mode = keys.of("rl_config", "swanlab_mode") if name == "swanlab" else None
        if mode is not None and mode.value not in _SWANLAB_MODES:
            keys.refuse(mode, f"must be one of {', '.join(filter(None, _SWANLAB_MODES))}")
        tracker = {"name": name, "mode": _SWANLAB_MODES.get(mode.value or "", "online") if mode else "online"}
        trackers.append(tracker | ({"project": project.value} if project.value else {}))
        deciding += given(project, *([mode] if mode else []))
    keys.put("trackers", trackers, *deciding)


def _advice(keys: RoleSettings) -> list[str]:
    """Return what the user should know besides the single keys."""
    apart = "as their devices are apart already" if not keys.rl else "once services.rollout.colocate is left out"
    messages = [
        "training.staleness is 0, as there: an iteration waits for its samples. Sluice's default, 2, lets sampling and "
        f"training overlap, {apart}"
    ] * (keys.values["training.staleness"] == 0)
    if (devices := keys.values.get("services.trainer.processes") or 0) > layout.OF_A_MACHINE:
        secret = "; and SLUICE_SECRET in each one's environment" if keys.values.get("cluster.shared_folder") is False else ""
        messages.append(
            f"services.trainer.processes is {devices}, and no Atlas machine has more than {layout.OF_A_MACHINE} devices: "
            f"several machines want cluster.min_nodes, services.coordinator.host and port, and network.interface{secret} "
            "(docs/guides/cluster.md)"
        )
    if "model.path" not in keys.values:
        messages.append("model.path is missing: name the Hugging Face folder of the model")
    if isinstance(keys.values.get("data.train"), str) and keys.values["data.train"].endswith(".parquet"):
        messages.append(f"{keys.values['data.train']} is made by sluice data prepare, from what preprocess_data was given")
    return messages + keys.advice
