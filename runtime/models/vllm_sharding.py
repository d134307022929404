"""Which part of each tensor a worker of vLLM needs, declared by the family of the model. Pure; nothing here imports vLLM.

A rollout's workers share an arena, so what is not declared, or wrongly, may come through another worker's link: no more."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from runtime.cluster.topology import fleets, rollout_workers
from runtime.config import Config
from runtime.models.families import Layout, family_for
from runtime.models.hf_folder import read_raw
from runtime.weights.plan import Cut, Sharding, TensorSpec

_VOCABULARY = 64  # vLLM pads the rows of embedding and head to a multiple of this
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def workers_sharding(config: Config, specs: Sequence[TensorSpec]) -> Sharding:
    """Return how the tensors `specs` are cut over the workers of a rollout: as many as the largest `tensor_parallel` of the
    fleets. A tensor whose layout is unknown goes whole to any of them."""
    if (workers := rollout_workers(config)) == 1:
        return Sharding()
    known, anyone = dict(_needs(config, workers)), Sharding.whole(workers).cuts[0]
    return Sharding.of(workers, [known.get((spec.name, spec.shape)) or anyone for spec in specs])


def undeclared(config: Config) -> str | None:
    """Return a line about the matrices that any worker may take, as vLLM's layout of them is not declared; None: none."""
    if (workers := rollout_workers(config)) == 1:
        return None
    names = [name for (name, _), cut in _needs(config, workers) if cut is None]
    what = f"{workers} workers share out {len(names)} matrices whole, such as {' '.join(names[:1])}"
    return f"services.rollout.tensor_parallel: {what}: their layout in vLLM is not declared" if names else None


def _needs(config: Config, workers: int) -> Iterator[tuple[tuple[str, tuple[int, ...]], Cut | None]]:
    """Yield the cut of each matrix that no worker needs whole, by name and shape; None: unknown. vLLM's layers cut as those of
    megatron-core do: by rows of queries, keys, values, gate, up and vocabulary, by columns of the two output projections. With
    expert parallelism each worker has whole experts."""
    family = family_for(read_raw(config.model.path), config.model.path, mapped=False)
    by_expert = any(fleet.engine_args.get("enable_expert_parallel") for fleet in fleets(config).values())
    count, kv_heads = family.shape.experts.count if family.shape.experts else 1, family.shape.kv_heads
    for parameter in family.parameters(Layout()):
        for number, source in enumerate(parameter.sources):
            owner = _EXPERT.search(source.name)
            if owner is not None and by_expert:
                yield (source.name, source.shape), Cut(((int(owner[1]) * workers // count,),))
            elif parameter.split is not None and len(source.shape) == 2:
                heads = kv_heads if len(parameter.sources) == 3 and number else 0  # keys and values of grouped-query attention
                padded = -(-source.shape[0] // _VOCABULARY) * _VOCABULARY if parameter.padded else 0
                length = padded or source.shape[parameter.split]
                yield (source.name, source.shape), _even(length, parameter.split, workers, heads)
            elif len(source.shape) == 3:  # a layer's experts in one tensor
                yield (source.name, source.shape), None


def _even(length: int, dim: int, workers: int, heads: int) -> Cut | None:
    """Return an even cut. Of fewer `heads` than workers, neighbouring workers share one. None: the length does not divide."""
    parts = heads if 0 < heads < workers else workers
    if length % parts or workers % parts:
        return None
    each = workers // parts
    return Cut(tuple(tuple(range(part * each, (part + 1) * each)) for part in range(parts)), dim, length // parts)
