"""Memory of a rank of a layout, in bytes: exact for weights, gradients and optimizer, an estimate for activations."""

from __future__ import annotations

import math

import msgspec

from runtime.models.families.adapters import AdapterTable
from runtime.models.families.family import Family
from runtime.models.families.layout import Layout
from runtime.models.families.shape import ModelShape

CHUNK_ELEMENTS = 1 << 26  # logits that a trainer computes at once: 256 MiB in float32
GRADIENT = 4  # float32
_LOGIT = 12  # bytes a logit: its float32 copy, what the backward pass keeps of it, and its gradient
# Bytes a token and unit of width that a layer's backward pass needs, after arXiv:2205.05198, equation 2, without scores.
_LAYER = 34


class RankBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of the rank that holds most."""

    weights: int
    gradients: int = 0
    optimizer: int = 0
    activations: int
    constant: int = 0
    """The part of the activations that does not grow with more tokens: a whole chunk of logits."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations


class ModelWork(msgspec.Struct, frozen=True, kw_only=True):
    """The work of a group of ranks with the model. `width`: bytes of a weight in computations."""

    ranks: int
    tokens: int  # of a micro-batch
    width: int = 2
    trains: bool = True
    sequence: bool = False
    checkpointing: bool = False


def rank_bytes(family: Family, layout: Layout, work: ModelWork, adapters: AdapterTable | None = None) -> RankBytes:
    """Return the largest memory of the pipeline's stages. An element of a weight costs `width` bytes, and in training 4 for its
    gradient. Master weight and moments, 12 bytes (8 if the weight itself is float32), are sharded over the ranks that hold the
    same element: the blocks, or for experts the blocks with the same experts. With `adapters`, only these train, in float32.
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
    """Return the bytes of logits, and whether they are those of a whole chunk."""
    if stage < layout.pipeline - 1 or family.value_head:
        return 0, False
    every = work.tokens * layout.padded_vocab(family.shape) // layout.tensor
    each = work.width + _LOGIT if work.trains else work.width
    return min(every, CHUNK_ELEMENTS) * each, every > CHUNK_ELEMENTS


def _activations(family: Family, layout: Layout, work: ModelWork, stage: int) -> int:
    """Return the bytes of the micro-batches in flight on the stage, one for each stage from it to the last. With checkpointing
    they keep each layer's input, and one layer is recomputed. Logits and data sent between experts are left out."""
    shape = family.shape
    row = work.tokens * shape.hidden_size * work.width  # a layer's input
    layer = (row * _LAYER // 2 + work.tokens * work.width * _beyond(shape)) // layout.tensor
    if not work.trains:
        return layer
    layers, under_way = len(layout.stage_layers(shape, stage)), layout.pipeline - stage
    if not work.checkpointing:
        return layers * under_way * layer
    return layers * under_way * (row // layout.tensor if work.sequence else row) + layer


def _beyond(shape: ModelShape) -> int:
    """Return the elements a token of latent attention's heads (queries, keys, values and outputs) beyond four times the width,
    which `_LAYER` counts for other attention."""
    latent = shape.latent
    return 0 if latent is None else max(0, 2 * shape.heads * (latent.head + latent.value) - 4 * shape.hidden_size)
