"""From MindSpeed-RL's keys to a configuration of Sluice's, with a record of what became of each. Pure."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from itertools import accumulate
from pathlib import PurePath
from typing import Any

from launcher.importing.keys import Read, Setting, Translation, given, scaled, translation
from launcher.mindspeed.reading import TABLE as TABLE
from launcher.mindspeed.reading import RoleSettings
from launcher.mindspeed.reading import read as read
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


def translate(read: Read, without: Collection[str] = ()) -> Translation:
    """Translate the keys. Raises ConfigError: a line for each key that is unknown, of a wrong type, or impossible in Sluice."""
    settings = RoleSettings(read, without)
    facts = _facts(settings)
    settings.copy(facts)
    settings.put("run.name", settings.name)
    settings.put("model.path", settings.role("actor", "tokenizer_name_or_path").value, settings.role("actor", "load"))
    _data(settings)
    _lengths(settings)
    _rules(settings)
    _reward_model(settings)
    _algorithm(settings, facts)
    _training(settings, facts["dapo"])
    _services(settings)
    _trackers(settings)
    return translation(settings, _advice(settings))


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
    files = [part if PurePath(part).suffix in _DATA_FILES else f"{part}.parquet" for part in parts]
    if len(parts) < 2:
        return "".join(files)
    try:
        weights = [float(part) for part in parts[::2]]
    except ValueError:
        weights = []
    if len(parts) % 2 == 0 and weights and min(weights) > 0:
        return [{"path": path, "weight": weight} for weight, path in zip(weights, files[1::2], strict=True)]
    if listed:
        return [{"path": path} for path in files]
    keys.faults.append(f"{setting.path}: {setting.value}: is not WEIGHT,PREFIX,WEIGHT,PREFIX,...")
    return ""


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


def _mini_batch(keys: RoleSettings, mini: Setting, batch: int) -> None:
    samples, prompts = keys.values.get("sampling.group_size") or 1, mini.value
    if prompts > batch:
        fewer = prompts // samples  # in older versions it counted samples
        counted = not keys.rl and prompts % samples == 0 and fewer < batch and batch % fewer == 0
        prompts = fewer if counted else batch
    if prompts < 1 or batch % prompts:
        keys.faults.append(f"{mini.path}: {mini.value}: does not divide the {batch} prompts of a step")
    else:
        keys.put("training.mini_batch_size", 0 if prompts == batch else prompts, mini)


def _optimizer(keys: RoleSettings) -> None:
    """Translate the policy's optimizer, and report what the critic's has otherwise: here they share it."""
    warmup, steps, rate = (keys.role("actor", name) for name in ("lr_warmup_fraction", "train_iters", "lr"))
    if warmup.value is not None and steps.value is not None:
        keys.put("training.optimizer.warmup_steps", round(warmup.value * steps.value), warmup)
    betas = [keys.role("actor", f"adam_beta{index}") for index in (1, 2)]
    if None not in (values := [beta.value for beta in betas]):
        keys.put("training.optimizer.betas", values, *betas)
    if "critic" in keys.values:
        critics_rate = keys.role("critic", "lr")
        keys.put("critic.learning_rate", critics_rate.value, critics_rate)
        for name in _OF_OPTIMIZER:
            policys = keys.role("actor", name).value
            least = scaled(policys, rate.value, critics_rate.value) if name == "min_lr" else policys
            keys.not_of_critic(keys.role("critic", name), least)


def _trackers(keys: RoleSettings) -> None:
    if not keys.rl:
        return
    flags = {name: keys.of("rl_config", f"use_{name}") for name in ("tensorboard", "wandb", "swanlab")}
    deciding = [each for each in given(*flags.values()) if each.value is not None]
    trackers: list[dict[str, Any]] = [{"name": "jsonl"}]
    if flags["tensorboard"].value or not flags["tensorboard"].given:
        trackers.append({"name": "tensorboard"})
    for name in (name for name in ("wandb", "swanlab") if flags[name].value):
        project, mode = keys.of("rl_config", f"{name}_project"), keys.of("rl_config", "swanlab_mode")
        if name == "wandb":
            mode = Setting("", "online", False)
        elif mode.value not in _SWANLAB_MODES:
            keys.refuse(mode, f"must be one of {', '.join(filter(None, _SWANLAB_MODES))}")
        tracker = {"name": name, "mode": _SWANLAB_MODES.get(mode.value, "online")}
        trackers.append(tracker | ({"project": project.value} if project.value else {}))
        deciding += given(project, mode)
    keys.put("trackers", trackers, *deciding)


def _advice(keys: RoleSettings) -> list[str]:
    """Return what the user should know besides the single keys."""
    apart = "as their devices are apart already" if not keys.rl else "once services.rollout.colocate is left out"
    messages = [
        "training.staleness is 0, as there: an iteration waits for its samples. Sluice's default, 2, lets sampling and "
        f"training overlap, {apart}"
    ] * (keys.values["training.staleness"] == 0)
    if (devices := keys.values.get("services.trainer.processes") or 0) > OF_A_MACHINE:
        secret = "; and SLUICE_SECRET in each one's environment" if keys.values.get("cluster.shared_folder") is False else ""
        messages.append(
            f"services.trainer.processes is {devices}, and no Atlas machine has more than {OF_A_MACHINE} devices: "
            f"several machines want cluster.min_nodes, services.coordinator.host and port, and network.interface{secret} "
            "(docs/guides/cluster.md)"
        )
    if "model.path" not in keys.values:
        messages.append("model.path is missing: name the Hugging Face folder of the model")
    if isinstance(keys.values.get("data.train"), str) and keys.values["data.train"].endswith(".parquet"):
        messages.append(f"{keys.values['data.train']} is made by sluice data prepare, from what preprocess_data was given")
    return messages + keys.advice


# ---- Sections rewards and algorithm, and what belongs to them of sampling and critic

STAGES = ("ray_grpo", "ray_ppo", "ray_dapo")
# Our rules by their verifiers. Entries of the older format replace those of the current one.
_RULES = {
    **{name: name for name in ("acc", "format", "step", "strict_format", "base_acc", "math_17k_acc", "acc_for_dapo")},
    "acc_for_ppo": "math_17k_acc",
    "math_verify_reward": "base_acc",
}
_OLDER_RULES = {"acc": "r1_zero_acc", "format": "r1_zero_format"}
_TOP_K = 50  # the default of the current format


def _rules(keys: RoleSettings) -> None:
    """Translate the rules of `rewards` by their names and weights."""
    ruled = keys.either("rl_config.rule_reward", "reward.verifier")
    names, weights = keys.each("rl_config" if keys.rl else "algorithm", "verifier_function", "verifier_weight")
    if not ruled.value or names.value is None or weights.value is None:
        return
    known = _RULES | (_OLDER_RULES if keys.format == "r1_zero" else {})
    for name in names.value:
        if name == "retool_reward":
            instead = "take acc_for_dapo, or a rule of your own"
            keys.refuse(names, f"retool_reward counts tool calls, and a sample has none; {instead}")
        elif name not in known:
            near = get_close_matches(str(name), list(known), n=1)
            hint = f"nearest is {near[0]}" if near else f"must be of {', '.join(known)}"
            keys.refuse(names, f"{name} is no verifier; {hint}. MindSpeed-RL passes over it in silence")
    if len(names.value) != len(weights.value):
        keys.faults.append(f"{weights.path}: has {len(weights.value)} weights for the {len(names.value)} of verifier_function")
        return
    for weight in weights.value:
        if isinstance(weight, bool) or not isinstance(weight, (int, float)):
            keys.faults.append(f"{weights.path}: {weight!r} is not a number")
            return
    if any(name not in known for name in names.value):
        return
    rules = [
        {"name": known[name]} | ({"weight": float(weight)} if weight != 1 else {})
        for name, weight in zip(names.value, weights.value, strict=True)
    ]
    keys.put("rewards.rules", rules, names, *given(weights, ruled))


def _reward_model(keys: RoleSettings) -> None:
    """Translate the reward model of `rewards` if it is given devices."""
    pool, load = keys.either("rl_config.reward_resource.num_npus", "resource_pool.reward"), keys.role("reward", "load")
    count = pool.value if keys.rl else keys.summed(pool)
    if not count or not pool.given or (not keys.rl and keys.of("reward", "verifier").value):
        return
    keys.put("services.reward_model.replicas", count, pool)
    if load.value is None or not load.given:
        keys.faults.append(f"{pool.path}: {count} devices for a reward model, which no section names (load)")
    else:
        keys.put("rewards.model.path", load.value, load)


def _algorithm(keys: RoleSettings, facts: dict[str, Any]) -> None:
    """Translate `algorithm`, and the keys of `sampling` and `critic` that belong to it."""
    stage, estimator = keys.role("actor", "stage"), _estimator(keys)
    if stage.value not in (None, *STAGES):
        keys.refuse(stage, f"Sluice trains by reinforcement; must be one of {', '.join(STAGES)}")
    if estimator.value not in (None, "group_norm", "gae"):
        keys.refuse(estimator, "must be group_norm or gae")
    keys.put("algorithm.advantage", estimator.value, estimator, *given(stage))
    load, actors = keys.role("critic", "load"), keys.role("actor", "load")
    if estimator.value == "gae":
        keys.put("critic.path", load.value if load.given and load.value != actors.value else None, load)
    higher = keys.of("rl_config", "clip_higher_enable")
    if facts["higher"]:
        for side in ("low", "high"):
            keys.put(f"algorithm.clip_{side}", keys.values.get(f"algorithm.clip_{side}"), higher)
    if facts["kl"] and not keys.rl:
        keys.put("algorithm.kl_placement", "reward", keys.at("algorithm.kl_penalty"))
    likeliest = keys.of("generate_config", "sampling_config.top_k")
    if keys.rl and likeliest.value == _TOP_K:
        keys.say(
            f"{_TOP_K} is what every file without it has there; here training samples from the whole distribution", likeliest
        )
        keys.advice.append(
            f"{likeliest.path} is {_TOP_K}{'' if likeliest.given else ' there, as the file has none'}: replies came from the "
            f"{_TOP_K} likeliest tokens. Training here samples from the whole distribution: {_TOP_K} is taken for -1"
        )
    filtered, limit = keys.each("rl_config", "filter_groups_enable", "filter_groups_max_batches")
    if facts["dapo"] and filtered.value and (limit.value or 0) > 0:
        keys.put("algorithm.dynamic_sampling_limit", limit.value, limit)
    if keys.rl:
        _overlong(keys)


def _estimator(keys: RoleSettings) -> Setting:
    return keys.either("rl_config.adv_estimator", "algorithm.adv_estimator")


def _facts(keys: RoleSettings) -> dict[str, Any]:
    """Return the facts that other keys depend on: `when` in the table."""
    gae, stage = _estimator(keys).value == "gae", keys.role("actor", "stage").value
    if stage not in STAGES:  # the file does not say
        stage = "ray_ppo" if gae else "ray_grpo"
    lora = bool(keys.role("actor", "lora_target_modules").value)
    keys.put("critic", {} if gae else None)
    keys.put("lora", {} if lora else None)
    first, older, reward, higher = keys.each("rl_config", "init_kl_coef", "kl_coef", "use_kl_in_reward", "clip_higher_enable")
    current = older if older.given else first
    # ray_grpo has its KL term in the loss, ray_ppo in the rewards if asked for, as the older format always, and ray_dapo none.
    has_term = not keys.rl or stage == "ray_grpo" or (stage == "ray_ppo" and gae and bool(reward.value))
    coefficient = current if keys.rl else keys.at("algorithm.kl_ctrl.kl_coef")
    return {
        "gae": gae,
        "dapo": stage == "ray_dapo",
        "higher": keys.rl and stage == "ray_dapo" and bool(higher.value),
        "older": older.given,  # kl_coef, of older files
        "kl": has_term and bool(coefficient.value),
        "adaptive": keys.at("algorithm.kl_ctrl.type").value == "adaptive",
        "ppo": stage == "ray_ppo",
        "lora": lora,
        "remote_code": keys.of("generate_config", "trust_remote_code").value,
    }


def _overlong(keys: RoleSettings) -> None:
    on, buffer, factor = keys.each("rl_config", *(f"overlong_buffer{end}" for end in ("_enable", "", "_penalty_factor")))
    most = keys.of("rl_config", "rollout_max_tokens")
    reply = keys.values.get("sampling.max_new_tokens")
    if not on.value or not buffer.value or reply is None:
        return
    if (most.value or reply) != reply:
        keys.faults.append(f"{most.path}: {most.value}: is not how long a reply may be, {reply}")
    elif buffer.value >= reply:
        keys.faults.append(f"{buffer.path}: {buffer.value}: must be below the {reply} tokens that a reply may have")
    else:
        keys.put("algorithm.overlong_buffer", buffer.value / reply, buffer, on)
        keys.put("algorithm.overlong_penalty", factor.value, factor)


# ---- Section services: resources, parallelism and engines, and the budgets of tokens

_WAYS = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "context": "context_parallel_size",
    "expert": "expert_model_parallel_size",
}
_LAYERS = {  # megatron-core's linear layers by those of Hugging Face's layout
    "linear_qkv": ["q_proj", "k_proj", "v_proj"],
    "linear_proj": ["o_proj"],
    "linear_fc1": ["gate_proj", "up_proj"],
    "linear_fc2": ["down_proj"],
}
ASCEND = "ascend"
HCCL_BUFFER = 256  # MiB, which services.platform ascend sets
OF_A_MACHINE = 16  # devices at most: of Atlas A3, and of 200T A2 Box16; others have 8


def _services(keys: RoleSettings) -> None:
    """Translate `services`, `lora`, `reference` and the token budgets."""
    keys.put("services.platform", ASCEND, *given(keys.of("rl_config", "runtime_env_path")))
    lora = _lora(keys)
    (_current if keys.rl else _older)(keys, lora)
    _budgets(keys)
    _recomputation(keys, "actor", "trainer")
    if "critic" in keys.values:
        _recomputation(keys, "critic", "critic")


def _current(keys: RoleSettings, lora: bool) -> None:
    together, older, shared = keys.each("rl_config", "use_integrated_worker", "colocate_all_models", "colocate_actor_ref")
    actor, reference, critic = (keys.of("rl_config", f"{name}_resource.num_npus") for name in ("actor", "reference", "critic"))
    chosen = older if older.given and not together.given else together
    integrated = chosen.value is not False  # also if it is left out: roles without devices of their own share the actor's
    _spread(keys, "actor", "trainer", [actor], actor.value)
    _rollouts(keys, actor)
    # Training and sampling share devices in either case: the actor is one hybrid worker there.
    keys.put("services.rollout.colocate", "trainer", together, *given(older))
    if "critic" in keys.values:
        _spread(keys, "critic", "critic", [critic if critic.given else actor], critic.value or actor.value)
        if integrated:
            keys.put("services.critic.colocate", "trainer", together)
    _reference(keys, integrated or bool(shared.value), reference, actor, lora)
    if shared.value and "services.reference.engine" in keys.values:
        keys.put("services.reference.colocate", "trainer", shared)
    size = keys.of("rl_config", "hccl_buffersize")
    if size.given and size.value not in (None, HCCL_BUFFER):
        for role in ("trainer", "rollout", *(["critic"] if "critic" in keys.values else [])):
            keys.put(f"services.{role}.env.HCCL_BUFFSIZE", str(size.value), size)


def _older(keys: RoleSettings, lora: bool) -> None:
    train, infer = keys.role("actor", "num_gpus_for_train"), keys.role("actor", "num_gpus_for_infer")
    pool = keys.of("resource_pool", "actor_rollout")
    total = keys.summed(pool)
    if total is not None and None not in (train.value, infer.value) and total != train.value + infer.value:
        keys.faults.append(
            f"{pool.path}: {total} devices, but num_gpus_for_train {train.value} + num_gpus_for_infer {infer.value} are "
            f"{train.value + infer.value}"
        )
    _spread(keys, "actor", "trainer", [train, pool], train.value)
    ways = keys.role("actor", "tensor_model_parallel_size").value or 1
    keys.put("services.rollout.engine", "vllm", infer)
    keys.put("services.rollout.parallel.tensor", ways, infer)
    if infer.value is not None:
        if infer.value % ways:
            keys.faults.append(f"{infer.path}: {infer.value}: is not a multiple of tensor_model_parallel_size {ways}")
        keys.put("services.rollout.replicas", infer.value // ways, infer, pool)
    critic = keys.of("resource_pool", "critic")
    if "critic" in keys.values:
        _spread(keys, "critic", "critic", [critic], keys.summed(critic))
    _reference(keys, False, keys.of("resource_pool", "ref"), train, lora)


def _spread(keys: RoleSettings, role: str, service: str, counted: list[Setting], devices: int | None) -> None:
    """Translate an SPMD group: its processes, and how the model is spread over them."""
    path = f"services.{service}"
    keys.put(f"{path}.engine", "megatron")
    sizes: dict[str, int] = {}
    for ours, theirs in _WAYS.items():
        setting = keys.role(role, theirs)
        if service == "reference" and ours == "context":
            sizes[ours] = 1  # the reference runs forward only, without context parallelism
            continue
        sizes[ours] = 1 if setting.value is None else setting.value
        if sizes[ours] < 1:
            keys.faults.append(f"{setting.path}: {setting.value}: must be at least 1")
            return
        keys.put(f"{path}.parallel.{ours}", sizes[ours], setting)
    sequence = keys.role(role, "sequence_parallel")
    if sizes["tensor"] > 1 and sequence.value is not None:
        keys.put(f"{path}.parallel.sequence", sequence.value, sequence)
    _stages(keys, role, path, sizes["pipeline"])
    _blocks(keys, path, counted, devices, sizes)


def _blocks(keys: RoleSettings, path: str, counted: list[Setting], devices: int | None, sizes: dict[str, int]) -> None:
    """Translate the number of processes. They form blocks of ranks, among which a step's prompts have to be shared out."""
    if devices is None:
        return
    block = sizes["tensor"] * sizes["pipeline"] * sizes["context"]
    if devices < 1 or devices % block:
        product = " x ".join(f"{name} {sizes[name]}" for name in ("tensor", "pipeline", "context"))
        keys.faults.append(f"{counted[0].path}: {devices}: is not a multiple of {product}")
        return
    keys.put(f"{path}.processes", devices, *counted)
    batch = keys.values.get("training.groups_per_step")
    mini = keys.values.get("training.mini_batch_size") or batch
    if mini and mini % (devices // block) and path != "services.reference":
        keys.faults.append(
            f"{counted[0].path}: {devices}: makes {devices // block} data-parallel blocks, among which the {mini} prompts of "
            "an update cannot be shared out"
        )


def _stages(keys: RoleSettings, role: str, path: str, stages: int) -> None:
    """Translate `layers_per_stage`, from num_layer_list, or from noop_layers, which even out unequal stages."""
    listed, noops, layers = keys.role(role, "num_layer_list"), keys.role(role, "noop_layers"), keys.role(role, "num_layers")
    counts = _numbers(keys, listed) if listed.value is not None else []
    empty = _numbers(keys, noops) if noops.value is not None else []
    if counts is None or empty is None:
        return
    if counts and len(counts) != stages:
        keys.faults.append(f"{listed.path}: {listed.value}: has {len(counts)} stages, pipeline_model_parallel_size {stages}")
        return
    if empty and not counts:
        if not layers.value or layers.value % stages or max(empty) >= layers.value:
            keys.faults.append(
                f"{noops.path}: {noops.value}: num_layers {layers.value} says of no stage which of its layers are empty"
            )
            return
        counts = [layers.value // stages] * stages
    ends = accumulate(counts)
    held = [count - sum(end - count <= layer < end for layer in empty) for count, end in zip(counts, ends, strict=True)]
    if len(set(held[1:-1])) > 1:
        why = "megatron-core wants all stages but the first and the last to have the same number of layers; left out, all have"
        keys.refuse(listed if listed.value is not None else noops, why)
    elif held:
        equal = len(set(held)) == 1
        deciding = [each for each in (listed, noops) if each.value is not None] + ([layers] if empty else [])
        keys.put(f"{path}.parallel.layers_per_stage", [] if equal else held, *deciding)


def _numbers(keys: RoleSettings, setting: Setting) -> list[int] | None:
    """Return a list of whole numbers, which may be text with commas; None, and a fault, if it is no such list."""
    parts = setting.value if isinstance(setting.value, list) else str(setting.value).split(",")
    try:
        return [int(str(part)) for part in parts if str(part).strip()]
    except ValueError:
        keys.faults.append(f"{setting.path}: {setting.value}: is not a list of whole numbers")
        return None


def _reference(keys: RoleSettings, shared: bool, own: Setting, actor: Setting, lora: bool) -> None:
    """Translate the frozen model: on the trainer's devices, in a turn of its own, or on devices of its own."""
    path, backbone = "services.reference", keys.of("rl_config", "share_backbone")
    load, original = keys.role("reference", "load"), keys.of("rl_config", "integrated_mode_config.ref_model_load_path")
    if not keys.values.get("algorithm.kl_coefficient"):
        return
    if lora and backbone.value:
        keys.put("reference.source", "adapter_off", backbone)
        return
    role = "actor" if shared else "reference"
    count = actor.value if shared else own.value if not isinstance(own.value, list) else keys.summed(own)
    _spread(keys, role, "reference", [actor if shared else own], count)
    if shared:
        keys.put(f"{path}.colocate", "trainer", keys.of("rl_config", "use_integrated_worker"))
    start = keys.role("actor", "load").value
    for setting in (load, original):
        if setting.given and setting.value is not None and setting.value != start:
            keys.put("model.reference", setting.value, setting)


def _rollouts(keys: RoleSettings, actor: Setting) -> None:
    path, section = "services.rollout", "generate_config"
    keys.put(f"{path}.engine", "vllm")
    ways, stages = keys.of(section, "infer_tensor_parallel_size"), keys.of(section, "infer_pipeline_parallel_size")
    size = ways.value or 1
    keys.put(f"{path}.parallel.tensor", size, ways)
    keys.put(f"{path}.parallel.pipeline", stages.value or 1, stages)
    each = size * (stages.value or 1) * _data_ranks(keys, size)
    if actor.value is not None:
        if each < 1 or actor.value % each:
            keys.faults.append(f"{ways.path}: {size}: does not divide actor_resource.num_npus {actor.value}")
        else:
            keys.put(f"{path}.replicas", actor.value // each, actor, ways)
    for kind in ("optimizer", "grad", "param"):
        setting = keys.of(section, f"offload_train_{kind}")
        keys.add("services.trainer.offload", kind, setting)
        if "critic" in keys.values and kind != "param":  # a critic's weights are needed between updates
            keys.add("services.critic.offload", kind, setting)


def _data_ranks(keys: RoleSettings, ways: int) -> int:
    """Translate expert parallelism, and return the number of data-parallel ranks that share the experts. `ways`: the devices of
    each."""
    parallel = keys.of("generate_config", "enable_expert_parallel")
    experts = keys.of("generate_config", "infer_expert_parallel_size")
    spread = experts.value or 1
    if spread > ways and spread % max(ways, 1):
        keys.refuse(experts, f"a rollout spreads experts over ranks of infer_tensor_parallel_size {ways}; must be a multiple")
        return 1
    ranks = max(1, spread // max(ways, 1))
    if parallel.value or spread > 1:
        deciding = [each for each in (parallel, experts) if each.given and each.value and each.value != 1]
        keys.put("services.rollout.parallel.data", ranks, *deciding)
        keys.put("services.rollout.parallel.expert", ways * ranks, *deciding)
    return ranks


def _lora(keys: RoleSettings) -> bool:
    modules = keys.role("actor", "lora_target_modules")
    unknown = [name for name in modules.value or () if name not in _LAYERS]
    if unknown:
        keys.refuse(modules, f"{unknown[0]} is not one of {', '.join(_LAYERS)}")
    elif modules.value:
        keys.put("lora.target_modules", [layer for name in modules.value for layer in _LAYERS[name]], modules)
    return bool(modules.value)


def _recomputation(keys: RoleSettings, role: str, service: str) -> None:
    granularity, swapped = keys.role(role, "recompute_granularity"), keys.role(role, "swap_optimizer")
    if granularity.value == "full":
        keys.put(f"services.{service}.activation_checkpointing", True, granularity)
    keys.add(f"services.{service}.offload", "optimizer", swapped)


def tokens(keys: RoleSettings, samples: Setting) -> int | None:
    """Return the tokens of `samples` samples of the greatest length."""
    prompt, reply = keys.values.get("data.max_prompt_tokens"), keys.values.get("sampling.max_new_tokens")
    if samples.value is None or prompt is None or reply is None:
        return None
    return int(samples.value * (prompt + reply))


def _budgets(keys: RoleSettings) -> None:
    """Translate budgets: with use_dynamic_bsz max_tokens_to_oom or the packed size, else micro_batch_size samples in tokens."""
    micro, own = keys.role("actor", "micro_batch_size"), "training.max_tokens_per_microbatch"
    scored = "services.reference.max_tokens_per_microbatch"
    names = ("use_dynamic_bsz", "update_max_packing_token_size", "ref_max_packing_token_size")
    dynamic, update, reference = keys.each("rl_config", *names)
    limits = [keys.role("actor", "max_tokens_to_oom")]
    if keys.rl:
        limits += [keys.of(section, "max_tokens_to_oom") for section in ("rl_config", "generate_config")]
    budget = next((each for each in limits if each.given and each.value is not None), update)
    if dynamic.value:
        keys.put(own, budget.value, budget, dynamic)
    else:
        keys.put(own, tokens(keys, micro), micro)
    if "services.reference.engine" not in keys.values:
        return
    if keys.rl and dynamic.value:
        keys.put(scored, reference.value, reference)
    elif keys.rl:
        forward = keys.of("rl_config", "ref_forward_micro_batch_size")
        keys.put(scored, tokens(keys, forward), forward)
    own_micro = keys.role("reference", "micro_batch_size")
    if own_micro.path.startswith(("ref_config", "actor_rollout_ref.ref")):
        keys.put(scored, tokens(keys, own_micro), own_micro)
