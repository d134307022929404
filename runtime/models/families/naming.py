"""Other names of megatron-core's parameters on a rank, beside the names in the table of `family`. Pure.

Transformer Engine fuses a norm with the matrix after it, and numbers a layer's experts within one module. Grouped matrix
products have the experts as one tensor. A reward model of MindSpeed has its head beside the language model's.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from enum import Enum

import msgspec

from runtime.models.families.family import HEAD
from runtime.models.families.parameter import Parameter

FUSED = {  # in a layer
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
}
REWARD_HEAD = "rm_head.weight"  # [1, hidden], columns sharded over tensor ranks
REWARD_BIAS = "rm_head.bias"
_DOWN = re.compile(r"(.*\.self_attention)\.linear_(q|kv)_down_proj\.weight")
_MINDSPEED = {  # ends of MindSpeed's names
    "self_attention.linear_q_up_proj.weight": "self_attention.linear_qb.weight",
    "self_attention.linear_kv_up_proj.weight": "self_attention.linear_kvb.weight",
    "self_attention.kv_layernorm.weight": "self_attention.k_layernorm.weight",
}
_EXPERT = re.compile(r"(.*\.experts)\.local_experts\.(\d+)\.linear_fc([12])\.weight")


class ExpertStorage(Enum):
    """How the experts of a layer are stored on a rank."""

    SEQUENTIAL = "a matrix each"
    NUMBERED = "a matrix each, as Transformer Engine names them"
    GROUPED = "one matrix with a transposed part for each expert"


class LatentStorage(Enum):
    """How latent attention's down-projections are stored on a tensor rank."""

    CUT = "a part of each"
    WHOLE = "all of each, as in Transformer Engine"
    JOINED = "all of both as one, as in MindSpeed-LLM"


class Naming(msgspec.Struct, frozen=True, kw_only=True):
    """The names that a checkpoint uses for parameters with several names."""

    fused: bool = False
    experts: ExpertStorage = ExpertStorage.SEQUENTIAL
    latent: LatentStorage = LatentStorage.CUT
    reward_head: bool = False


class Place(msgspec.Struct, frozen=True):
    """Where a rank stores a parameter: whole, or transposed as part `expert` of a tensor of several experts."""

    name: str
    expert: int | None = None


def places(name: str) -> Iterator[tuple[Naming, Place]]:
    """Yield all places where a parameter may be stored."""
    yield Naming(), Place(name)
    for own, fused in FUSED.items():
        if name.endswith(own):
            yield Naming(fused=True), Place(name.removesuffix(own) + fused)
    if (expert := _EXPERT.fullmatch(name)) is not None:
        stem, number, matrix = expert.groups()
        yield Naming(experts=ExpertStorage.NUMBERED), Place(f"{stem}.linear_fc{matrix}.weight{number}")
        yield Naming(experts=ExpertStorage.GROUPED), Place(f"{stem}.weight{matrix}", int(number))


def place(name: str, naming: Naming, names: Collection[str]) -> Place:
    """Return where `naming` stores the parameter, on a rank that has `names`. A norm without its matrix, such as the one
    before experts, stays on its own."""
    for kind, found in places(name):
        matrix = found.name.removesuffix("layer_norm_weight") + "weight"
        if (kind.fused and naming.fused and matrix in names) or (
            kind.experts is not ExpertStorage.SEQUENTIAL and kind.experts == naming.experts
        ):
            return found
    return Place(name)


def latent_stored(held: Sequence[Parameter], storage: LatentStorage) -> list[Parameter]:
    """Return a rank's parameters, with latent attention's in `storage`. MindSpeed-LLM has other names for some."""
    if storage is LatentStorage.CUT:
        return list(held)
    whole = [msgspec.structs.replace(each, split=None) if _DOWN.fullmatch(each.name) else each for each in held]
    if storage is LatentStorage.WHOLE:
        return whole
    found: list[Parameter] = []
    for each in whole:
        down = _DOWN.fullmatch(each.name)
        if down is not None and down[2] == "kv":  # comes after the queries' down-projection, norm and up-projection
            index = next(index for index, other in enumerate(found) if other.name == f"{down[1]}.linear_qkv.weight")
            found[index] = msgspec.structs.replace(found[index], sources=(*found[index].sources, *each.sources))
            continue
        name = f"{down[1]}.linear_qkv.weight" if down is not None else each.name
        for own, other in _MINDSPEED.items():
            name = name.removesuffix(own) + other if name.endswith(own) else name
        found.append(msgspec.structs.replace(each, name=name))
    return found


def reward_headed(parameter: Parameter) -> Parameter:
    """Return a parameter as in MindSpeed's reward model: the head is sharded by columns."""
    return msgspec.structs.replace(parameter, name=REWARD_HEAD, split=1) if parameter.name == HEAD else parameter
