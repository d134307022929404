"""Cross-checks of a well-typed configuration: values against each other, against model folders, and against memory.

Nothing here imports torch, so that a bad configuration is refused in well under a second. Each fault is one line that begins
with the YAML path of the value to change.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil

from runtime.cluster.topology import data_leaders, fleets, processes, uses_reference
from runtime.config import Algorithm, Config, RewardModel, Sampling, Warmup
from runtime.config.checks.colocation import colocation_faults
from runtime.config.checks.data import data_faults, evaluation_faults
from runtime.config.checks.devices import device_faults
from runtime.config.checks.megatron import megatron_faults
from runtime.config.checks.network import network_faults
from runtime.config.checks.publication import publication_faults
from runtime.config.checks.rewards import reward_faults
from runtime.config.checks.rollout import rollout_faults
from runtime.data.chosen import sources
from runtime.engines import tiny_family
from runtime.engines.limits import LORA_NEEDS_PEFT, kv_cache_bytes
from runtime.registry import OWN
from runtime.trackers import missing_package

ModelConfig = Mapping[str, Any]  # the contents of a Hugging Face config.json

_NEED_GROUPS = ("group_norm", "rloo", "reinforce_plus_plus_baseline")
_WEIGHTS = ("token_tis", "sequence_tis", "icepop")  # corrections that multiply by the behaviour weight
_EXPERTS = "qwen3_moe"
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def semantic_faults(
    config: Config,
    known: Mapping[str, Sequence[str]] | None = None,
    available_bytes: int | None = None,
    trains: bool = True,
) -> list[str]:
    """One line per fault, [] when there is none.

    `known` lists the registered names under "algorithm.advantage", "algorithm.loss", "algorithm.correction",
    "algorithm.aggregation", "algorithm.kl", "data.handler" and "rewards.rules", and under "critic" those of the advantages that
    need a critic's values; what it leaves out is not checked.
    `available_bytes` is the memory for KV slots: this host's when None. With a `warmup` section, paths that the warm-up will
    name may be empty. `trains`: False for an evaluation alone, which needs problems to evaluate on, and nothing that only
    training does.
    """
    policy = _policy(config)
    if available_bytes is None:
        available_bytes = psutil.virtual_memory().available
    faults = [
        *_run(config),
        *_names(config, known or {}),
        *reward_faults(config, trains),
        *evaluation_faults(config, trains),
        *data_faults(config, trains),
        *_models(config, policy, trains),
        *_lengths(config, policy),
        *_kv_memory(config, policy, available_bytes),
        *_experts(config, policy, trains),
        *_processes(config),
        *device_faults(config, trains),
        *network_faults(config, trains),
        *colocation_faults(config, trains),
        *rollout_faults(config, policy),
    ]
    if not trains:
        return faults
    return [
        *faults,
        *_algorithm(config.algorithm, config.sampling),
        *_critic(config, known or {}),
        *_reference(config),
        *_values(config),
        *_updates(config),
        *_lora(config),
        *publication_faults(config, policy),
        *megatron_faults(config, spread_models(config)),
    ]


def _run(config: Config) -> Iterator[str]:
    name, resume = config.run.name, config.run.resume
    if name in ("", ".", "..") or "/" in name:
        yield f"run.name: '{name}' is not the name of a folder; runs/NAME is where a run lives"
    if resume not in ("never", "auto") and not Path(resume).is_dir():
        yield f"run.resume: '{resume}' is not a checkpoint's folder; never and auto are allowed besides"
    for index, tracker in enumerate(config.trackers):
        package = missing_package(tracker)
        if package:
            yield f"trackers.{index}.name: {tracker.name} needs a package: pip install '{package}'"


def _names(config: Config, known: Mapping[str, Sequence[str]]) -> Iterator[str]:
    algorithm = config.algorithm
    chosen = {
        "algorithm.advantage": algorithm.advantage,
        "algorithm.loss": algorithm.loss,
        "algorithm.correction": algorithm.correction,
        "algorithm.aggregation": algorithm.aggregation,
        "algorithm.kl": algorithm.kl,
        "data.handler": config.data.handler,
    }
    for path, name in chosen.items():
        yield from _name(path, name, known.get(path), own=True)
    own_handlers = {key.replace(".path", ".handler"): source.handler for key, source in sources(config.data)}
    own_handlers |= {f"evaluation.sets.{index}.handler": entry.handler for index, entry in enumerate(config.evaluation.sets)}
    for key, handler in own_handlers.items():
        if handler is not None:
            yield from _name(key, handler, known.get("data.handler"), own=True)
    for index, rule in enumerate(config.rewards.rules):
        yield from _name(f"rewards.rules.{index}.name", rule.name, known.get("rewards.rules"), own=True)


def _name(path: str, name: str, known: Sequence[str] | None, own: bool) -> Iterator[str]:
    """`own`: FILE.py:NAME is allowed."""
    file, mark, _ = name.rpartition(OWN)
    if own and mark:
        if not Path(f"{file}.py").is_file():
            yield f"{path}: '{file}.py' is not a file"
    elif known is not None and name not in known:
        yield f"{path}: '{name}' is not one of {', '.join(sorted(known))}" + ", nor FILE.py:NAME" * own


def _algorithm(algorithm: Algorithm, sampling: Sampling) -> Iterator[str]:
    size = sampling.group_size
    if algorithm.advantage in _NEED_GROUPS and size < 2:
        yield f"sampling.group_size: {size} is too few; algorithm.advantage {algorithm.advantage} needs at least 2"
    elif algorithm.dynamic_sampling and size < 2:
        yield f"sampling.group_size: {size} is too few; algorithm.dynamic_sampling needs at least 2, whose rewards can differ"
    if 0 < algorithm.dual_clip <= 1:
        yield f"algorithm.dual_clip: {algorithm.dual_clip:g} is not 0 (off) or > 1"
    if algorithm.loss == "gspo" and algorithm.aggregation != "seq_mean_token_mean":
        yield f"algorithm.aggregation: '{algorithm.aggregation}' is not seq_mean_token_mean; loss gspo is one value a sample"
    if algorithm.loss == "decoupled" and algorithm.correction in _WEIGHTS:
        yield (
            f"algorithm.correction: '{algorithm.correction}' with loss decoupled would weigh by proximal / behaviour twice; "
            "take loss ppo, or correction none"
        )
    low, high = algorithm.correction_low, algorithm.correction_high
    if algorithm.correction in ("icepop", "geometric_mask") and not low <= 1 <= high:
        yield f"algorithm.correction_low: [{low:g}, {high:g}] leaves out 1, the weight where both engines agree"
    if algorithm.kl_target and not algorithm.kl_coefficient:
        yield "algorithm.kl_target: needs kl_coefficient > 0 to start from"
    if algorithm.kl_importance_weighted and algorithm.kl_placement == "reward":
        yield "algorithm.kl_importance_weighted: true is for kl_placement loss; rewards are of the tokens as they were sampled"


def _critic(config: Config, known: Mapping[str, Sequence[str]]) -> Iterator[str]:
    advantage = config.algorithm.advantage
    needed = advantage in known.get("critic", ())
    if needed and config.critic is None:
        yield f"critic: missing; algorithm.advantage {advantage} needs one"
    if config.critic is not None and not needed and advantage in known.get("algorithm.advantage", ()):
        yield f"critic: there is one, but algorithm.advantage {advantage} takes no values; leave the section out"


def _reference(config: Config) -> Iterator[str]:
    mode, coefficient = config.reference.mode, config.algorithm.kl_coefficient
    if mode == "none" and coefficient > 0:
        yield f"reference.mode: none leaves the KL term of algorithm.kl_coefficient {coefficient:g} without its reference"
    if mode == "adapter_off" and config.lora is None:
        yield "reference.mode: adapter_off needs a lora section; it is the policy without its adapters"
    settings = config.services.reference
    if settings.engine == "torch" and settings.processes > 1:
        yield f"services.reference.processes: {settings.processes} is for engine megatron; engine torch takes replicas"
    if settings.engine == "megatron" and settings.replicas > 1:
        yield f"services.reference.replicas: {settings.replicas} is for engine torch; engine megatron takes processes"


def _values(config: Config) -> Iterator[str]:
    optimizers = {"training.optimizer": config.training.optimizer}
    if config.critic is not None:
        optimizers["critic.optimizer"] = config.critic.optimizer
    for path, optimizer in optimizers.items():
        low, high = optimizer.min_learning_rate, optimizer.learning_rate
        if low > high:
            yield f"{path}.min_learning_rate: {low:g} is above learning_rate {high:g}"
    in_flight = config.publication.in_flight
    if config.training.staleness == 0 and in_flight in ("keep", "recompute"):
        yield (
            f"publication.in_flight: {in_flight} swaps weights under samples; with training.staleness 0 each sample is of one "
            "version, so only drain (or auto) is allowed"
        )
    if config.stop.accuracy > 0 and config.evaluation.every == 0:
        yield "stop.accuracy: needs evaluation.every >= 1, which measures it"


def _models(config: Config, policy: ModelConfig | None, trains: bool) -> Iterator[str]:
    path, reference = config.model.path, config.model.reference
    if path:
        yield from _folder_faults("model.path", path, needs_tokenizer=True)
    elif config.warmup is None:
        yield "model.path: missing; name a Hugging Face folder, or give a warmup section"
    else:
        yield from _warmup_faults(config.warmup)
    if config.rewards.model is not None:
        yield from _reward_model(config.rewards.model, policy)
    others = {"model.reference": reference, "critic.path": config.critic.path if config.critic else ""}
    for key, folder in others.items() if trains else ():
        if folder and folder != path:
            yield from _folder_faults(key, folder, needs_tokenizer=False)
            wanted, found = (policy or {}).get("vocab_size"), (_model_config(folder) or {}).get("vocab_size")
            if None not in (wanted, found) and wanted != found:
                yield f"{key}: '{folder}' has a vocabulary of {found} tokens, the policy one of {wanted}"


def _reward_model(settings: RewardModel, policy: ModelConfig | None) -> Iterator[str]:
    key, folder = "rewards.model.path", settings.path
    yield from _folder_faults(key, folder, needs_tokenizer=settings.input == "text")
    found = _model_config(folder, scores=True)
    if found is None:
        return
    if not any(str(name).endswith("ForSequenceClassification") for name in found.get("architectures") or ()):
        yield f"{key}: '{folder}' is not a sequence classifier (architectures in its config.json)"
    elif len(found.get("id2label") or "two") != 1:
        yield f"{key}: '{folder}' has not one label (id2label in its config.json); a reward is one number"
    wanted, ids, limit = (policy or {}).get("vocab_size"), found["vocab_size"], found.get("max_position_embeddings")
    reads_text = settings.input == "text" or (settings.input == "auto" and (Path(folder) / "tokenizer.json").is_file())
    if wanted is not None and ids < wanted and not reads_text:
        yield f"{key}: '{folder}' has a vocabulary of {ids} tokens, the policy one of {wanted}, and it is to read its tokens"
    if limit is not None and settings.max_tokens > limit:
        yield f"rewards.model.max_tokens: {settings.max_tokens} is above the model's {limit} positions"


def _folder_faults(key: str, folder: str, needs_tokenizer: bool) -> Iterator[str]:
    if folder.startswith(tiny_family.PREFIX):
        if wrong := tiny_family.fault(folder):
            yield f"{key}: {wrong}"
        return
    path = Path(folder)
    if not path.is_dir():
        yield f"{key}: '{folder}' is not a folder"
        return
    if _model_config(folder) is None:
        yield f"{key}: '{folder}' has no config.json of a Llama-like model"
    if needs_tokenizer and not (path / "tokenizer.json").is_file():
        yield f"{key}: '{folder}' has no tokenizer.json"
    index = path / "model.safetensors.index.json"
    shards = sorted(set(((_json(index) or {}).get("weight_map") or {}).values()))
    missing = [shard for shard in shards if not (path / shard).is_file()]
    if missing:
        yield f"{key}: '{folder}' lacks {missing[0]}, which its index names" + f", and {len(missing) - 1} more" * (
            len(missing) > 1
        )
    elif not shards and not any(path.glob("*.safetensors")):
        yield f"{key}: '{folder}' has no weights (*.safetensors)"


def _warmup_faults(warmup: Warmup) -> Iterator[str]:
    if warmup.hidden_size % (2 * warmup.heads):
        yield f"warmup.hidden_size: {warmup.hidden_size} is not a multiple of 2 · heads = {2 * warmup.heads}"
    if warmup.heads % warmup.kv_heads:
        yield f"warmup.kv_heads: {warmup.kv_heads} does not divide heads = {warmup.heads}"


def _lengths(config: Config, policy: ModelConfig | None) -> Iterator[str]:
    limit = (policy or {}).get("max_position_embeddings")
    if limit is None:
        return
    prompt = config.data.max_prompt_tokens
    for key, reply in (
        ("sampling.max_new_tokens", config.sampling.max_new_tokens),
        ("evaluation.max_new_tokens", config.evaluation.max_new_tokens),
    ):
        if prompt + reply > limit:
            yield f"{key}: {reply} and data.max_prompt_tokens {prompt} exceed the model's {limit} positions"


def _kv_memory(config: Config, policy: ModelConfig | None, available: int) -> Iterator[str]:
    if policy is None:
        return
    length = config.data.max_prompt_tokens + max(config.sampling.max_new_tokens, config.evaluation.max_new_tokens)
    free = available
    for path, fleet in fleets(config).items():
        if fleet.engine != "torch":  # vLLM divides its own memory
            continue
        dtype = "float32" if fleet.dtype == "auto" else fleet.dtype  # what auto is on a CPU, whose memory this is
        needed = fleet.replicas * kv_cache_bytes(policy, fleet.slots + 1, length, _DTYPE_BYTES.get(str(dtype), 4))
        if needed > free:
            yield (
                f"{path}.slots: {fleet.slots} slots of {length} tokens in {fleet.replicas} replica(s) need "
                f"{needed / 2**30:.1f} GiB of KV cache; {free / 2**30:.1f} GiB are available"
            )
        free -= min(needed, free)


def _experts(config: Config, policy: ModelConfig | None, trains: bool) -> Iterator[str]:
    """What does without transformers, and without vLLM, has the experts of one family."""
    kind = _other_experts(policy)
    for path in (path for path, fleet in fleets(config).items() if kind and fleet.engine == "torch"):
        yield f"{path}.engine: torch has experts of {_EXPERTS} alone, and model.path is a {kind}; must be vllm"
    reference = config.model.reference
    kind = _other_experts(_model_config(reference)) if reference else kind
    if kind and trains and uses_reference(config) and config.services.reference.engine == "torch":
        yield f"services.reference.engine: torch has experts of {_EXPERTS} alone, and the model is a {kind}; must be another"


def _other_experts(model: ModelConfig | None) -> str:
    """The model_type of a model with experts that are not _EXPERTS; "" for any other model."""
    counts = ("num_experts", "num_local_experts", "n_routed_experts")
    kind = str((model or {}).get("model_type"))
    return kind if kind != _EXPERTS and any((model or {}).get(count) for count in counts) else ""


def _updates(config: Config) -> Iterator[str]:
    """Every update must share its groups out evenly over the ranks."""
    groups, mini_batch = config.training.groups_per_step, config.training.mini_batch_size
    if mini_batch and groups % mini_batch:
        yield f"training.mini_batch_size: {mini_batch} does not divide groups_per_step = {groups}"
    key, size = ("mini_batch_size", mini_batch) if mini_batch else ("groups_per_step", groups)
    for role in ("trainer", "critic") if config.critic is not None else ("trainer",):
        settings = getattr(config.services, role)
        shares = len(data_leaders(settings))
        if shares and size % shares:
            what = f"{shares} blocks of {settings.processes}" if shares < settings.processes else str(shares)
            yield f"services.{role}.processes: {what} does not divide training.{key} = {size}"


def _processes(config: Config) -> Iterator[str]:
    if not fleets(config):
        yield "services.rollout: an empty list; at least one fleet is needed"
    for path, process in processes(config).items():
        if process.python and shutil.which(process.python) is None:
            yield f"{path}.python: '{process.python}' is not an executable" + _how_to_install(process.python)


def _how_to_install(python: str) -> str:
    """What makes the interpreter that is missing, where Sluice's own Makefile does."""
    return "; run make install-vllm" if ".venv-vllm" in Path(python).parts else ""


def _lora(config: Config) -> Iterator[str]:
    # A trainer with an interpreter of its own has other packages; it says so itself.
    if config.lora is not None and not config.services.trainer.python and importlib.util.find_spec("peft") is None:
        yield LORA_NEEDS_PEFT
    algorithm = config.algorithm
    kl_in_reward = algorithm.kl_coefficient > 0 and algorithm.kl_placement == "reward"
    if config.reference.mode == "adapter_off" and config.critic is not None and kl_in_reward:
        yield "reference.mode: adapter_off serves no critic, which algorithm.kl_placement reward needs it to; must be service"


def spread_models(config: Config) -> dict[str, ModelConfig | None]:
    """By role, of those that may be on megatron-core: the contents of the model's config.json, as far as it is known."""
    policy = _policy(config)
    models = {"trainer": policy}
    if config.critic is not None:
        models["critic"] = _model_config(config.critic.path) if config.critic.path else policy
    if uses_reference(config):
        models["reference"] = _model_config(config.model.reference) if config.model.reference else policy
    return models


def _policy(config: Config) -> ModelConfig | None:
    return _model_config(config.model.path) if config.model.path else _warmup_config(config.warmup)


def _warmup_config(warmup: Warmup | None) -> ModelConfig | None:
    """What of the warm-up's model is known before it exists."""
    if warmup is None:
        return None
    return {
        "num_hidden_layers": warmup.layers,
        "num_attention_heads": warmup.heads,
        "num_key_value_heads": warmup.kv_heads,
        "hidden_size": warmup.hidden_size,
    }


def _model_config(folder: str, *, scores: bool = False) -> ModelConfig | None:
    """config.json of a Llama-like model; None when there is none, or it lacks what the checks here read. `scores`: what a tiny
    one is of, a reward model."""
    if tiny := tiny_family.described(folder, scores=scores):
        return tiny
    found = _json(Path(folder) / "config.json")
    needed = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size")
    return found if found and all(isinstance(found.get(key), int) and found[key] > 0 for key in needed) else None


def _json(path: Path) -> dict[str, Any] | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError, msgspec.ValidationError):
        return None
