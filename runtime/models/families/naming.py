"""Other names that megatron-core's parameters have on a rank, beside those of the table in `family`. Pure.

Transformer Engine makes a norm one with the matrix behind it, and a layer's experts numbered weights of one module; grouped
matrix products have them as one tensor. A reward model of MindSpeed has its head beside the language model's.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from enum import Enum

import msgspec

from runtime.models.families.family import HEAD
from runtime.models.families.parameter import Parameter

FUSED = {  # of a layer
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
}
REWARD_HEAD = "rm_head.weight"  # [1, hidden], its columns cut over tensor ranks
REWARD_BIAS = "rm_head.bias"
_DOWN = re.compile(r"(.*\.self_attention)\.linear_(q|kv)_down_proj\.weight")
_MINDSPEED = {  # the ends of its names
    "self_attention.linear_q_up_proj.weight": "self_attention.linear_qb.weight",
    "self_attention.linear_kv_up_proj.weight": "self_attention.linear_kvb.weight",
    "self_attention.kv_layernorm.weight": "self_attention.k_layernorm.weight",
}
_EXPERT = re.compile(r"(.*\.experts)\.local_experts\.(\d+)\.linear_fc([12])\.weight")


class ExpertStorage(Enum):
    """How the experts of a layer are stored on a rank."""

    SEQUENTIAL = "a matrix each"
    NUMBERED = "a matrix each, as Transformer Engine names them"
    GROUPED = "one matrix, of which each expert has a transposed part"


class LatentStorage(Enum):
    """How latent attention's down-projections are stored on a tensor rank."""

    CUT = "a part of each"
    WHOLE = "all of each, as Transformer Engine has them"
    JOINED = "all of both as one, as MindSpeed-LLM has them"


class Naming(msgspec.Struct, frozen=True, kw_only=True):
    """How a checkpoint is to name what has several names."""

    fused: bool = False
    experts: ExpertStorage = ExpertStorage.SEQUENTIAL
    latent: LatentStorage = LatentStorage.CUT
    reward_head: bool = False


class Place(msgspec.Struct, frozen=True):
    """Where a rank stores a parameter: whole, or as part number `expert` of a tensor that has the others' too, transposed."""

    name: str
    expert: int | None = None


def places(name: str) -> Iterator[tuple[Naming, Place]]:
    """All that a parameter may be stored as."""
    yield Naming(), Place(name)
    for own, fused in FUSED.items():
        if name.endswith(own):
            yield Naming(fused=True), Place(name.removesuffix(own) + fused)
    if (expert := _EXPERT.fullmatch(name)) is not None:
        stem, number, matrix = expert.groups()
        yield Naming(experts=ExpertStorage.NUMBERED), Place(f"{stem}.linear_fc{matrix}.weight{number}")
        yield Naming(experts=ExpertStorage.GROUPED), Place(f"{stem}.weight{matrix}", int(number))


def place(name: str, naming: Naming, names: Collection[str]) -> Place:
    """Where the parameter is stored by `naming`, on a rank that has `names`.

    A norm without its matrix, such as the one before experts, stays on its own.
    """
    for kind, found in places(name):
        matrix = found.name.removesuffix("layer_norm_weight") + "weight"
        if (kind.fused and naming.fused and matrix in names) or (
            kind.experts is not ExpertStorage.SEQUENTIAL and kind.experts == naming.experts
        ):
            return found
    return Place(name)


def latent_stored(held: Sequence[Parameter], storage: LatentStorage) -> list[Parameter]:
    """A rank's parameters, those of latent attention as `storage` has them. MindSpeed-LLM has other names for some."""
    if storage is LatentStorage.CUT:
        return list(held)
    whole = [msgspec.structs.replace(each, split=None) if _DOWN.fullmatch(each.name) else each for each in held]
    if storage is LatentStorage.WHOLE:
        return whole
    found: list[Parameter] = []
    for each in whole:
        down = _DOWN.fullmatch(each.name)
        if down is not None and down[2] == "kv":  # behind that of the queries, its norm and its up-projection
            place = next(index for index, other in enumerate(found) if other.name == f"{down[1]}.linear_qkv.weight")
            found[place] = msgspec.structs.replace(found[place], sources=(*found[place].sources, *each.sources))
            continue
        name = f"{down[1]}.linear_qkv.weight" if down is not None else each.name
        for own, other in _MINDSPEED.items():
            name = name.removesuffix(own) + other if name.endswith(own) else name
        found.append(msgspec.structs.replace(each, name=name))
    return found


def reward_headed(parameter: Parameter) -> Parameter:
    """A parameter as MindSpeed's reward model has it: the head is cut by columns."""
    return msgspec.structs.replace(parameter, name=REWARD_HEAD, split=1) if parameter.name == HEAD else parameter
