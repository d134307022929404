"""MindSpeed-RL's resources, parallelism and engines as Sluice's section `services`, and the token budgets. Pure."""

from __future__ import annotations

from itertools import accumulate

from launcher.importing.keys import Setting, given
from launcher.mindspeed.reading import RoleSettings

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


def services(keys: RoleSettings) -> None:
    """Translate `services`, `lora`, `reference` and the token budgets."""
    environment = keys.of("rl_config", "runtime_env_path")
    keys.put("services.platform", ASCEND, *given(environment))
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
    keys.put("services.rollout.tensor_parallel", ways, infer)
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
    counted = [actor if shared else own]
    _spread(keys, role, "reference", counted, count)
    if shared:
        keys.put(f"{path}.colocate", "trainer", keys.of("rl_config", "use_integrated_worker"))
    start = keys.role("actor", "load").value
    for setting in (load, original):
        if setting.given and setting.value is not None and setting.value != start:
            keys.put("model.reference", setting.value, setting)


def _rollouts(keys: RoleSettings, actor: Setting) -> None:
    path, section = "services.rollout", "generate_config"
    keys.put(f"{path}.engine", "vllm")
    ways = keys.of(section, "infer_tensor_parallel_size")
    size = ways.value or 1
    keys.put(f"{path}.tensor_parallel", size, ways)
    if actor.value is not None:
        if size < 1 or actor.value % size:
            keys.faults.append(f"{ways.path}: {size}: does not divide actor_resource.num_npus {actor.value}")
        else:
            keys.put(f"{path}.replicas", actor.value // size, actor, ways)
    dtype = keys.of(section, "dtype")
    if dtype.value not in (None, "bfloat16", "float32", "auto"):
        keys.refuse(dtype, "must be bfloat16 or float32")
    keys.put(f"{path}.dtype", "float32" if dtype.value == "float32" else "auto", dtype)
    _expert_parallelism(keys, size)
    for kind in ("optimizer", "grad", "param"):
        setting = keys.of(section, f"offload_train_{kind}")
        keys.add("services.trainer.offload", kind, setting)
        if "critic" in keys.values and kind != "param":  # a critic's weights are needed between updates
            keys.add("services.critic.offload", kind, setting)


def _expert_parallelism(keys: RoleSettings, ways: int) -> None:
    parallel = keys.of("generate_config", "enable_expert_parallel")
    experts = keys.of("generate_config", "infer_expert_parallel_size")
    if experts.value is not None and experts.value > ways:
        keys.refuse(
            experts, f"a rollout spreads experts over its infer_tensor_parallel_size {ways} devices; must be at most that"
        )
    elif parallel.value or (experts.value or 1) > 1:
        deciding = [each for each in (parallel, experts) if each.given and each.value and each.value != 1]
        keys.put("services.rollout.engine_args.enable_expert_parallel", True, *deciding)


def _lora(keys: RoleSettings) -> bool:
    modules, rank, alpha = (keys.role("actor", f"lora_{name}") for name in ("target_modules", "r", "alpha"))
    if not modules.value:
        return False
    unknown = [name for name in modules.value if name not in _LAYERS]
    if unknown:
        keys.refuse(modules, f"{unknown[0]} is not one of {', '.join(_LAYERS)}")
        return True
    keys.put("lora", {})
    keys.put("lora.target_modules", [layer for name in modules.value for layer in _LAYERS[name]], modules)
    keys.put("lora.rank", rank.value, rank)
    keys.put("lora.alpha", None if alpha.value is None else float(alpha.value), alpha)
    return True


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


def token_limit(keys: RoleSettings) -> Setting | None:
    """Return max_tokens_to_oom, if the file has it."""
    found = [keys.role("actor", "max_tokens_to_oom")]
    if keys.rl:
        found += [keys.of(section, "max_tokens_to_oom") for section in ("rl_config", "generate_config")]
    return next((each for each in found if each.given and each.value is not None), None)


def _budgets(keys: RoleSettings) -> None:
    """Translate budgets: with use_dynamic_bsz max_tokens_to_oom or the packed size, else micro_batch_size samples in tokens."""
    micro, limit, own = keys.role("actor", "micro_batch_size"), token_limit(keys), "training.max_tokens_per_microbatch"
    scored = "services.reference.max_tokens_per_microbatch"
    names = ("use_dynamic_bsz", "update_max_packing_token_size", "ref_max_packing_token_size")
    dynamic, update, reference = keys.each("rl_config", *names)
    budget = limit if limit is not None else update
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
