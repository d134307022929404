"""Other names that megatron-core's parameters have on a rank, beside those of the table in `blocks`. Pure.

Transformer Engine makes a norm one with the matrix behind it, and a layer's experts numbered weights of one module; grouped
matrix products have them as one tensor. A reward model of MindSpeed has its head beside the language model's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from enum import Enum

import msgspec

from runtime.models.families.family import HEAD
from runtime.models.families.parameter import Parameter

FUSED = {  # of a layer
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
REWARD_HEAD = "rm_head.weight"  # [1, hidden], its columns cut over tensor ranks
REWARD_BIAS = "rm_head.bias"
_EXPERT = re.compile(r"(.*\.experts)\.local_experts\.(\d+)\.linear_fc([12])\.weight")


class ExpertStorage(Enum):
    """How the experts of a layer are stored on a rank."""

    SEQUENTIAL = "a matrix each"
    NUMBERED = "a matrix each, as Transformer Engine names them"
    GROUPED = "one matrix, of which each expert has a transposed part"


class Naming(msgspec.Struct, frozen=True, kw_only=True):
    """How a checkpoint is to name what has several names."""

    fused: bool = False
    experts: ExpertStorage = ExpertStorage.SEQUENTIAL
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


def place(name: str, naming: Naming, names: Iterable[str]) -> Place:
    """Where the parameter is stored by `naming`, on a rank that has `names`.

    A norm before experts stays on its own: it is not one with a matrix.
    """
    stem = name.removesuffix("pre_mlp_layernorm.weight")
    alone = stem != name and f"{stem}mlp.linear_fc1.weight" not in names
    for kind, found in places(name):
        if (kind.fused and naming.fused and not alone) or (
            kind.experts is not ExpertStorage.SEQUENTIAL and kind.experts == naming.experts
        ):
            return found
    return Place(name)


def reward_headed(parameter: Parameter) -> Parameter:
    """A parameter as MindSpeed's reward model has it: the head is cut by columns."""
    return msgspec.structs.replace(parameter, name=REWARD_HEAD, split=1) if parameter.name == HEAD else parameter
