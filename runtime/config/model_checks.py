"""Checks of model folders, of layouts on megatron-core, and of the memory of processes.

Loads neither torch, transformers nor megatron-core. A role with its own interpreter checks their abilities in its process.
The memory of accelerators is unknown here: the processes check it when they start."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from runtime.cluster.topology import UPDATED, block_size, fleets, model_key, teachers, uses_reference
from runtime.config import Config, Parallel, RewardModel, Spread, Trainer
from runtime.config.base import computed_dtype
from runtime.errors import UserError
from runtime.models import hf_folder, limits, quantized, tiny_model
from runtime.models.families import FAMILIES, family_for
from runtime.models.families.memory import RankBytes
from runtime.models.limits import (
    MEGATRON_NEEDS_CORE,
    copies_bytes,
    kv_cache_bytes,
    layout_of,
    longest_text,
    memory_fault,
    rank_memory,
    uncut,
    unreplayed,
)

ModelConfig = Mapping[str, Any]  # the contents of a Hugging Face config.json

_CAUSAL, _CLASSIFIERS = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"
_MEANT = {_CAUSAL: "causal language model", _CLASSIFIERS: "sequence classifier"}
_SHARDS = "engine torch spreads models over all its processes, and takes expert alone"
_ON_TORCH = {"trainer": _SHARDS, "critic": _SHARDS, "reference": "engine torch has one process a replica"}
_HINT = "; if it is to run on devices, cluster.nodes says so (name, devices)"
PROBES = 1  # slots of a replica besides its own: of the probe that compares its log-probabilities with the trainer's
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


def model_faults(config: Config, trains: bool) -> Iterator[str]:
    policy = policy_model(config)
    yield from _models(config, policy, trains)
    limit, prompt = (policy or {}).get("max_position_embeddings") or math.inf, config.data.max_prompt_tokens
    for key, replies in (("sampling", config.sampling), ("evaluation", config.evaluation)):
        if prompt + (reply := replies.max_new_tokens) > limit:
            yield f"{key}.max_new_tokens: {reply} and data.max_prompt_tokens {prompt} exceed the model's {limit} positions"
    if config.gateway is not None and config.gateway.context > limit:
        yield f"gateway.context: {config.gateway.context} exceeds the model's {limit} positions"
    yield from _engines(config, policy, trains)


def _models(config: Config, policy: ModelConfig | None, trains: bool) -> Iterator[str]:
    path, reference = config.model.path, config.model.reference
    if path:
        yield from _folder_faults("model.path", path, needs_tokenizer=True)
    elif config.warmup is None:
        yield "model.path: missing; name a Hugging Face folder, or give a warmup section"
    if config.rewards.model is not None:
        yield from _reward_model(config.rewards.model, policy)
    others = {"model.reference": reference, **teachers(config), "critic.path": config.critic.path if config.critic else ""}
    for key, folder in others.items() if trains else ():
        if folder and folder != path:
            yield from _folder_faults(key, folder, needs_tokenizer=False)
            wanted, found = (policy or {}).get("vocab_size"), (_model_config(folder) or {}).get("vocab_size")
            if wanted is not None and found is not None:
                exact = key == "critic.path" or bool(config.sampling.filters["keep_sets"])
                yield from filter(None, [token_fault(key, folder, found, path, wanted, exact)])


def token_fault(key: str, folder: str, vocabulary: int, policy: str, wanted: int, filtered: bool) -> str:
    """Return why the model of `folder`, of `vocabulary` rows, cannot score samples of `policy`, of `wanted` rows; "" if it can.

    Models of one tokenizer may have different numbers of unused rows. This is harmless, unless sets of tokens are sent
    (`filtered`), which refer to the policy's rows."""
    own, theirs = _tokens(Path(policy)), _tokens(Path(folder))
    if own and theirs:
        for token, number in sorted(own.items(), key=lambda item: item[1]):
            if theirs.get(token) != number:
                differ = f"{token!r} is token {number} of it, and {theirs.get(token, 'none')} there"
                return f"{key}: '{folder}' has another tokenizer than the policy: {differ}"
    if vocabulary < wanted or (vocabulary > wanted and (filtered or not (own and theirs))):
        return f"{key}: '{folder}' has a vocabulary of {vocabulary} tokens, the policy one of {wanted}"
    return ""


class _AddedToken(msgspec.Struct, frozen=True):
    content: str
    id: int


class _TokenModel(msgspec.Struct, frozen=True):
    vocab: dict[str, int] | list[tuple[str, float]] = {}


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_AddedToken] = []
    model: _TokenModel = _TokenModel()


def _tokens(folder: Path) -> dict[str, int]:
    """Return the ids of all tokens in tokenizer.json; none if the file is missing or of an unknown kind."""
    try:
        found = msgspec.json.decode((folder / "tokenizer.json").read_bytes(), type=_TokenizerFile)
    except (OSError, msgspec.DecodeError):
        return {}
    vocab = found.model.vocab
    listed = vocab if isinstance(vocab, dict) else {token: number for number, (token, _) in enumerate(vocab)}
    return listed | {added.content: added.id for added in found.added_tokens}


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
    if folder.startswith(tiny_model.PREFIX):
        if wrong := tiny_model.fault(folder):
            yield f"{key}: {wrong}"
        return
    path = Path(folder)
    if not path.is_dir():
        yield f"{key}: '{folder}' is not a folder"
        return
    if _model_config(folder) is None:
        yield f"{key}: '{folder}' has no config.json of a language model"
    if needs_tokenizer and not (path / "tokenizer.json").is_file():
        yield f"{key}: '{folder}' has no tokenizer.json"
    index = path / "model.safetensors.index.json"
    try:
        shards = hf_folder.shard_names(index) if index.is_file() else []
        if key in ("model.path", "critic.path"):  # the trained model gets files of these
            hf_folder.described_files(path)
    except UserError as error:
        yield f"{key}: {error}"
        return
    missing = [shard for shard in shards if not (path / shard).is_file()]
    if missing:
        more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        yield f"{key}: '{folder}' lacks {missing[0]}, which its index names{more}"
    elif not shards and not any(path.glob("*.safetensors")):
        yield f"{key}: '{folder}' has no weights (*.safetensors)"


def _engines(config: Config, policy: ModelConfig | None, trains: bool) -> Iterator[str]:
    """Yield a line for each model that an engine would refuse once loaded. All engines take a warm-up's model."""
    path, services = config.model.path, config.services
    for key, fleet in fleets(config).items() if path else ():
        if fleet.engine == "torch" and (fault := _undecodable(policy, "model.path")):
            yield f"{key}.engine: torch: {fault}; rollouts need {key}.engine vllm for this model"
        elif fleet.engine == "vllm" and (policy or {}).get(quantized.KEY) and not quantized.fault_of(policy or {}):
            yield f"{key}.engine: vllm: model.path is quantised, what is published is not; must be torch, or another folder"
    if config.rewards.model is not None and not services.reward_model.python:
        found = _model_config(config.rewards.model.path, scores=True)
        yield from _unloadable(found, "rewards.model.path", _CLASSIFIERS, hf_folder.unpackable)
    for role, model in spread_models(config).items() if trains else ():
        settings: Spread = getattr(services, role)
        where = model_key(config, role)
        if settings.engine != "torch" or (where == "model.path" and not path):
            continue
        decodes = role == "reference" and (model or {}).get("model_type") in FAMILIES
        table = _CLASSIFIERS if role == "critic" else _CAUSAL
        faults = () if settings.python else _unloadable(model, where, table, hf_folder.unread)
        for fault in filter(None, [_undecodable(model, where)] if decodes else faults):
            yield f"services.{role}.engine: torch: {fault}"


def _undecodable(model: ModelConfig | None, where: str) -> str:
    """Return why Sluice's decoder cannot compute a model; "" if it can, or the model is unknown."""
    try:
        if model is not None:
            hf_folder.parse(model, where)
    except UserError as error:
        return str(error)
    return ""


def _unloadable(model: ModelConfig | None, where: str, table: str, fault_of: Callable[[ModelConfig], str]) -> Iterator[str]:
    """Yield why transformers cannot run a model: `table` lacks its model_type, or `fault_of` finds a fault."""
    if model is None:
        return
    kind, known = model.get("model_type"), _known_to_transformers(table)
    if known and kind not in known:
        yield f"{where}: the installed transformers has no {_MEANT[table]} of model_type {kind!r}; must be another model"
    elif fault := fault_of(model):
        yield f"{where}: {fault}"


@cache
def _known_to_transformers(table: str) -> frozenset[str]:
    """Return the model_types of a table in transformers' source, as its import takes seconds; none if that is missing."""
    found = importlib.util.find_spec("transformers")
    for folder in (found.submodule_search_locations if found is not None else None) or ():
        tree = ast.parse((Path(folder) / "models" / "auto" / "modeling_auto.py").read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and table in ast.unparse(node).partition("=")[0]:
                pairs = [pair for pair in ast.walk(node) if isinstance(pair, ast.Tuple) and len(pair.elts) == 2]
                return frozenset(str(pair.elts[0].value) for pair in pairs if isinstance(pair.elts[0], ast.Constant))
    return frozenset()


def spread_models(config: Config) -> dict[str, ModelConfig | None]:
    """Return, for each role that may be on megatron-core, the contents of its model's config.json, if known."""
    policy = policy_model(config)
    models = {"trainer": policy}
    if config.critic is not None:
        models["critic"] = _model_config(config.critic.path) if config.critic.path else policy
    if uses_reference(config):
        models["reference"] = _model_config(config.model.reference) if config.model.reference else policy
    return models


def policy_model(config: Config) -> ModelConfig | None:
    """Return the policy's config.json; of a warm-up's model, before it exists, the known values."""
    if config.model.path or config.warmup is None:
        return _model_config(config.model.path) if config.model.path else None
    shape = tiny_model.WARMED_UP[config.warmup.task]
    return {
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "hidden_size": shape.hidden_size,
        "max_position_embeddings": tiny_model.CONTEXT_TOKENS,
    }


def _model_config(folder: str, *, scores: bool = False) -> ModelConfig | None:
    """Return the config.json of a language model; None if it is missing, or lacks a size under the names that we know. Models
    of other families may have other names. `scores`: a tiny model is a reward model."""
    found = tiny_model.described(folder, scores=scores) or _json(Path(folder) / "config.json") or {}
    sizes = ("vocab_size", "num_hidden_layers", "num_attention_heads", "hidden_size")
    needed = sizes if found.get("model_type", "llama") in FAMILIES else sizes[:1]
    return found if all(isinstance(found.get(key), int) and found[key] > 0 for key in needed) else None


def _json(path: Path) -> dict[str, Any] | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def megatron_faults(config: Config, models: Mapping[str, Mapping[str, Any] | None]) -> Iterator[str]:
    """Yield a line for each fault. `models`: by role, the contents of its model's config.json, if known."""
    for role, model in models.items():
        settings: Spread = getattr(config.services, role)
        key = f"services.{role}"
        if role == "critic" and isinstance(settings, Trainer) and "param" in settings.offload:
            yield f"{key}.offload: param leaves it no weights to compute values with between updates; must be left out"
        if settings.engine == "megatron":
            yield from _blocks(key, settings)
            # An interpreter of its own has other packages; the process says so itself.
            if not settings.python and not _installed():
                ascend = config.services.platform == "ascend"
                yield f"{key}.engine: {limits.MEGATRON_NEEDS_MINDSPEED if ascend else MEGATRON_NEEDS_CORE}"
            yield from _unsupported(key, config, settings)
            if model is not None:
                yield from _layout(key, config, settings, model)
        else:
            yield from _spread_experts(key, config, settings, model)
            if not isinstance(settings, Trainer):
                continue
            if config.checkpoint.async_save:
                yield f"checkpoint.async_save: true needs {key}.engine megatron; must be false for engine torch"
            if settings.offload and settings.cpu_offload:
                wrong = f"{settings.offload[0]}, but with cpu_offload all is in host memory at all times"
                yield f"{key}.offload: {wrong}; must be empty"


def _spread_experts(key: str, config: Config, settings: Spread, model: ModelConfig | None) -> Iterator[str]:
    """Yield a line for each fault of `parallel` with engine torch, which spreads a trained model's experts."""
    expert = settings.parallel.expert
    if settings.parallel != Parallel(expert=expert if isinstance(settings, Trainer) else 1):
        yield f"{key}.parallel: is for engine megatron; {_ON_TORCH[key.removeprefix('services.')]}"
        return
    if expert == 1:
        return
    experts = hf_folder.experts_of(model or {})
    count = experts.count if experts is not None else 0
    faults = {
        f"does not divide its {settings.processes} processes": settings.processes % expert,
        "is for models with experts": model is not None and experts is None,
        f"does not divide the {count} experts of a layer": count % expert,
        "is not for gpt_oss, whose experts are joined": experts is not None and experts.biased,
        "is not for adapters (lora)": config.lora is not None and key == "services.trainer",
        "is not for training.optimizer.name muon": config.training.optimizer.name == "muon",
    }
    yield from (f"{key}.parallel.expert: {expert} {fault}; must be 1" for fault, there in faults.items() if there)


def _blocks(key: str, settings: Spread) -> Iterator[str]:
    parallel, processes = settings.parallel, settings.processes
    block = block_size(parallel)
    product = f"parallel.tensor {parallel.tensor} x context {parallel.context} x pipeline {parallel.pipeline}"
    if parallel.data is None and processes % block:
        yield f"{key}.processes: {processes} is not a multiple of {product}"
    if parallel.data is not None and processes != block * parallel.data:
        expected = block * parallel.data
        yield f"{key}.processes: {processes} is not {product} x data {parallel.data}; must be {expected}, or left out"
    alike = processes // (parallel.tensor * parallel.pipeline)
    if processes % block == 0 and alike % parallel.expert:
        make = f"which {processes} processes of parallel.tensor {parallel.tensor} x pipeline {parallel.pipeline} make {alike}"
        ranks = f"the ranks that hold the same part of the model, of {make}"
        yield f"{key}.parallel.expert: {parallel.expert} does not divide {ranks}"
    if parallel.sequence and parallel.tensor == 1:
        yield f"{key}.parallel.sequence: true needs parallel.tensor > 1, whose ranks it spreads activations over"


def _unsupported(key: str, config: Config, settings: Spread) -> Iterator[str]:
    if not isinstance(settings, Trainer):
        return
    if settings.cpu_offload:
        yield f"{key}.cpu_offload: is engine torch's; must be false for engine megatron"
    name, once = config.training.optimizer.name, key == "services.trainer" or config.services.trainer.engine != "megatron"
    if name != "adamw" and once:
        yield f"training.optimizer.name: {name} is engine torch's; must be adamw for engine megatron"
    if settings.activation_checkpointing == "selective":
        yield f"{key}.activation_checkpointing: selective is engine torch's; must be true or false for engine megatron"


def _layout(key: str, config: Config, settings: Spread, policy: Mapping[str, Any]) -> Iterator[str]:
    parallel, stages = settings.parallel, settings.parallel.layers_per_stage
    made: dict[str, Any] = {}
    if config.warmup:
        made = {
            "model_type": "qwen2",
            "vocab_size": 1,
            "intermediate_size": tiny_model.WARMED_UP[config.warmup.task].intermediate_size,
            "tie_word_embeddings": True,
        }
    where = model_key(config, key.removeprefix("services."))
    try:
        described = {**made, **policy} if not config.model.path else policy
        family = family_for(described, where)
        hf_folder.parse(described, where)
        faults = [f"{key}.parallel: {fault}" for fault in layout_of(parallel).faults(family.shape)]
        if not faults:
            limits.adapters_of(config, key.removeprefix("services."), family)
    except UserError as error:
        yield str(error)
        return
    yield from faults
    if family.shape.experts is not None and parallel.tensor > 1 and not parallel.sequence:
        yield f"{key}.parallel.sequence: must be true for a mixture of experts with parallel.tensor {parallel.tensor}"
    if len(set(stages[1:-1])) > 1:
        yield f"{key}.parallel.layers_per_stage: {stages}: all but the first and the last number must be equal in megatron-core"
    version = "" if settings.python else _version()
    if key != "services.critic" and (fault := uncut(family.tied, parallel.pipeline, version)):
        yield f"{key}.{fault}"
    if key == "services.trainer" and config.moe.router_replay != "off" and (fault := unreplayed(version)):
        yield fault


def _version() -> str:
    """Return the version of the installed package, without importing it; "" if there is none."""
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return ""


def memory_of_ranks(config: Config, on_cpus: bool = False) -> dict[str, RankBytes]:
    """Return, for each role on megatron-core with a known model, the memory of a rank."""
    return {
        role: rank_memory(config, role, model, on_cpus)
        for role, model in spread_models(config).items()
        if model is not None and "model_type" in model and getattr(config.services, role).engine == "megatron"
    }


def _installed() -> bool:
    try:
        return importlib.util.find_spec("megatron.core") is not None
    except ModuleNotFoundError:
        return False


def kv_caches(config: Config, on_cpus: bool) -> dict[str, int]:
    """Return, for each fleet on engine torch with a known model, the bytes of a replica's KV cache."""
    policy = policy_model(config)
    if policy is None:
        return {}
    return {
        path: kv_cache_bytes(
            policy,
            fleet.max_num_seqs + PROBES,
            longest_text(config),
            _DTYPE_BYTES[computed_dtype(fleet.dtype, config.model.dtype, on_cpus)],
        )
        for path, fleet in fleets(config).items()
        if fleet.engine == "torch" and "num_attention_heads" in policy  # vLLM divides its own memory
    }


def kv_faults(config: Config, available: int | None) -> Iterator[str]:
    """Yield a line for each fleet that does not fit. `available`: bytes of the machine, if all is on its CPUs."""
    if available is None:
        return
    free = available
    for path, each in kv_caches(config, on_cpus=True).items():
        fleet = fleets(config)[path]
        needed = fleet.replicas * each
        if needed > free:
            slots = f"{fleet.max_num_seqs} slots of {longest_text(config)} tokens in {fleet.replicas} replica(s)"
            there = f"{free / 2**30:.1f} GiB are available{_HINT}"
            yield f"{path}.max_num_seqs: {slots} need {needed / 2**30:.1f} GiB of KV cache; {there}"
        free -= min(needed, free)


def memory_of_copies(config: Config) -> dict[str, int]:
    """Return, for trainer and critic with a known model, the bytes of the copies that `checkpoint.in_memory` keeps."""
    models = {role: model for role, model in spread_models(config).items() if role in UPDATED and model is not None}
    if config.checkpoint.in_memory == "off":
        return {}
    found = {}
    for role, model in models.items():
        with suppress(UserError):  # another check says what is wrong with the model
            found[role] = copies_bytes(config, role, model)
    return found


def copy_faults(config: Config, available: int | None) -> Iterator[str]:
    """Yield a line if the copies in memory do not fit. `available`: bytes of the machine, if all is on its CPUs."""
    needed = sum(memory_of_copies(config).values())
    if available is not None and needed > available:
        there = f"{available / 2**30:.1f} GiB are available; must be off"
        yield f"checkpoint.in_memory: {config.checkpoint.in_memory} needs {needed / 2**30:.1f} GiB of host memory, {there}"


def layout_faults(config: Config, available: int | None) -> Iterator[str]:
    """Yield `megatron_faults`, or else a line for each role on megatron-core that does not fit; its ranks share the memory."""
    faults = [*megatron_faults(config, spread_models(config))]
    yield from faults
    if faults or available is None:
        return
    for role, held in memory_of_ranks(config, on_cpus=True).items():
        share = available // getattr(config.services, role).processes
        if fault := memory_fault(config, role, held, share):
            yield fault + _HINT
