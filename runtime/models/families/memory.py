"""What a rank of a layout holds, in bytes: exact for weights, gradients and optimizer, an estimate for activations."""

from __future__ import annotations

import math

import msgspec

from runtime.models.families.adapters import AdapterTable
from runtime.models.families.family import Family
from runtime.models.families.layout import Layout
from runtime.models.families.shape import ModelShape

CHUNK_ELEMENTS = 1 << 26  # logits that a trainer makes at once: 256 MiB in float32
GRADIENT = 4  # float32
_LOGIT = 12  # a logit's: its float32 copy, what is kept of it for the backward pass, and its gradient
_LAYER = (
    34  # of a token's width: what a layer's backward pass wants, after arXiv:2205.05198, equation 2, without attention's scores
)


class RankBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Of the rank that holds most."""

    weights: int
    gradients: int = 0
    optimizer: int = 0
    activations: int
    constant: int = 0
    """Of the activations, what does not grow with more tokens: a whole chunk of logits."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations


class ModelWork(msgspec.Struct, frozen=True, kw_only=True):
    """What a group of ranks does with the model. `width`: bytes of a weight as it computes."""

    ranks: int
    tokens: int  # of a micro-batch
    width: int = 2
    trains: bool = True
    sequence: bool = False
    checkpointing: bool = False


def rank_bytes(family: Family, layout: Layout, work: ModelWork, adapters: AdapterTable | None = None) -> RankBytes:
    """The largest over the stages of a pipeline. An element of a weight costs `width` bytes, and in training 4 of its gradient.
    Master weight and moments, 12 (8 where the weight itself is float32), are shared out over the ranks that hold the same:
    the blocks, and of experts those blocks that have the same ones. With `adapters` these alone are trained, in float32.
    """
    stages = (_of_stage(family, layout, work, stage, adapters) for stage in range(layout.pipeline))
    return max(stages, key=lambda each: each.total)


def _of_stage(family: Family, layout: Layout, work: ModelWork, stage: int, adapters: AdapterTable | None) -> RankBytes:
    parameters = family.parameters(layout, pipeline_rank=stage)
    weights = work.width * sum(math.prod(parameter.shape) for parameter in parameters)
    if adapters is not None:
        parameters = adapters.parameters(layout, pipeline_rank=stage)
        weights += GRADIENT * sum(math.prod(parameter.shape) for parameter in parameters)
    expert = sum(math.prod(parameter.shape) for parameter in parameters if parameter.expert)
    shared = sum(math.prod(parameter.shape) for parameter in parameters) - expert
    logits, is_whole = _logits(family, layout, work, stage)
    activations = _activations(family, layout, work, stage) + logits
    if not work.trains:
        return RankBytes(weights=weights, activations=activations, constant=logits * is_whole)
    blocks = work.ranks // (layout.tensor * layout.pipeline)
    updated = 8 if work.width == 4 or adapters is not None else 12
    return RankBytes(
        weights=weights,
        gradients=GRADIENT * (shared + expert),
        optimizer=updated * shared // blocks + updated * expert * layout.expert // blocks,
        activations=activations,
        constant=logits * is_whole,
    )


def _logits(family: Family, layout: Layout, work: ModelWork, stage: int) -> tuple[int, bool]:
    """Bytes, and whether they are those of a whole chunk."""
    if stage < layout.pipeline - 1 or family.value_head:
        return 0, False
    every = work.tokens * layout.padded_vocab(family.shape) // layout.tensor
    each = work.width + _LOGIT if work.trains else work.width
    return min(every, CHUNK_ELEMENTS) * each, every > CHUNK_ELEMENTS


def _activations(family: Family, layout: Layout, work: ModelWork, stage: int) -> int:
    """Of the micro-batches under way on the stage, one for each stage from it to the last one. With checkpointing they keep
    what goes into each layer, and one layer is worked on. What is sent between experts is left out, and logits.
    """
    shape = family.shape
    row = work.tokens * shape.hidden_size * work.width  # what goes into a layer
    layer = (row * _LAYER // 2 + work.tokens * work.width * _beyond(shape)) // layout.tensor
    if not work.trains:
        return layer
    layers, under_way = len(layout.stage_layers(shape, stage)), layout.pipeline - stage
    if not work.checkpointing:
        return layers * under_way * layer
    return layers * under_way * (row // layout.tensor if work.sequence else row) + layer


def _beyond(shape: ModelShape) -> int:
    """Elements a token of the heads of latent attention, queries, keys, values and what attention gives, beyond the four times
    the width that `_LAYER` counts for those of other attention."""
    latent = shape.latent
    return 0 if latent is None else max(0, 2 * shape.heads * (latent.head + latent.value) - 4 * shape.hidden_size)
