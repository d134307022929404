"""Checks of the reference: where it runs, and that it, or a teacher in its place, has the policy's tokens; and of the policy's
experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from runtime.cluster.topology import teachers
from runtime.config import Config, Moe
from runtime.models import hf_config


def reference_faults(config: Config) -> Iterator[str]:
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
    for key, folder in teachers(config).items():
        if not coefficient:
            yield f"{key}: '{folder}' has no use without a KL term; algorithm.kl_coefficient must be above 0"
        elif mode != "service" or settings.engine == "megatron":
            needed = "reference.mode service and services.reference.engine torch, which holds several models"
            yield f"{key}: '{folder}' needs {needed}"
    yield from _nothing_to_learn(config)


def _nothing_to_learn(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.advantage == "none" and not algorithm.kl_coefficient and not algorithm.entropy_coefficient:
        yield "algorithm.advantage: none leaves nothing to learn; algorithm.kl_coefficient must be above 0"
    if algorithm.advantage == "none" and algorithm.dynamic_sampling:
        yield "algorithm.dynamic_sampling: true drops groups by rewards, which advantage none does not look at; must be false"


def moe_faults(config: Config, policy: Mapping[str, Any] | None) -> Iterator[str]:
    """One line per fault. `policy`: the contents of its config.json, as far as it is known."""
    experts, off = hf_config.experts_of(policy or {}), msgspec.structs.asdict(Moe())
    fixed = "is for models whose scores have a bias, as deepseek_v3's and glm4_moe's, and model.path has none"
    for name, value in msgspec.structs.asdict(config.moe).items():
        faults = {
            "is for models with experts, and model.path has none": policy is not None and experts is None,
            "is not for adapters (lora)": config.lora is not None,
            "needs services.trainer.engine torch": config.services.trainer.engine != "torch",
            fixed: name == "bias_update" and experts is not None and not experts.corrected,
        }
        wrong = [fault for fault, there in faults.items() if there and value != off[name]]
        yield from (f"moe.{name}: {value} {fault}; must be {off[name]}" for fault in wrong[:1])


def token_fault(key: str, folder: str, vocabulary: int, policy: str, wanted: int, filtered: bool) -> str:
    """Why the model of `folder`, with `vocabulary` rows, cannot say how likely it finds what the policy of the folder `policy`,
    with `wanted` rows, samples; "" where it can.

    Rows beyond those of the tokens, which models of one tokenizer have different numbers of, do no harm, unless sets of tokens
    travel (`filtered`), which are of the policy's rows.
    """
    own, theirs = _tokens(Path(policy)), _tokens(Path(folder))
    if own and theirs:
        for token, number in sorted(own.items(), key=lambda item: item[1]):
            if theirs.get(token) != number:
                there = f"{theirs[token]} there" if token in theirs else "none there"
                return (
                    f"{key}: '{folder}' has another tokenizer than the policy: {token!r} is token {number} of it, and {there}"
                )
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
    """Every token's id by tokenizer.json; none where there is no such file, or nothing is known of its kind."""
    try:
        found = msgspec.json.decode((folder / "tokenizer.json").read_bytes(), type=_TokenizerFile)
    except (OSError, msgspec.DecodeError):
        return {}
    vocab = found.model.vocab
    listed = vocab if isinstance(vocab, dict) else {token: number for number, (token, _) in enumerate(vocab)}
    return listed | {added.content: added.id for added in found.added_tokens}
