"""Which part of each tensor a worker of vLLM needs, declared by the family of the model. Pure; nothing here imports vLLM.

A rollout's workers share an arena, so what is not declared, or wrongly, may come through another worker's link: no more."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from runtime.cluster.topology import rollout_parallel
from runtime.config import Config, RolloutParallel
from runtime.models.families import Layout, family_for
from runtime.models.hf_folder import read_raw
from runtime.weights.plan import Cut, Sharding, TensorSpec

_VOCABULARY = 64  # vLLM pads the rows of embedding and head to a multiple of this
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_LAYER = re.compile(r"\.layers\.(\d+)\.")


def workers_sharding(config: Config, specs: Sequence[TensorSpec]) -> Sharding:
    """Return how the tensors `specs` are cut over the workers of a rollout: as many as the largest engine has on a node. A
    tensor whose layout is unknown goes whole to any of them; so do all to each node of an engine over several."""
    parallel = rollout_parallel(config)
    workers = parallel.devices_each
    if workers == 1:
        return Sharding()
    known, anyone = dict(_needs(config, parallel)) if parallel.nodes == 1 else {}, Sharding.whole(workers).cuts[0]
    return Sharding.of(workers, [known.get((spec.name, spec.shape)) or anyone for spec in specs])


def undeclared(config: Config) -> str | None:
    """Return a line about the matrices that any worker may take, as vLLM's layout of them is not declared; None: none."""
    parallel = rollout_parallel(config)
    if parallel.devices == 1 or parallel.nodes > 1:
        return None
    names = [name for (name, _), cut in _needs(config, parallel) if cut is None]
    what = f"{parallel.devices} workers share out {len(names)} matrices whole, such as {' '.join(names[:1])}"
    return f"services.rollout.parallel: {what}: their layout in vLLM is not declared" if names else None


def _needs(config: Config, parallel: RolloutParallel) -> Iterator[tuple[tuple[str, tuple[int, ...]], Cut | None]]:
    """Yield the cut of each matrix that no worker needs whole, by name and shape; None: unknown. vLLM's layers cut as those of
    megatron-core do: by rows of queries, keys, values, gate, up and vocabulary, by columns of the two output projections. The
    experts of a layer are over all devices of its stage: whole ones, or parts of each."""
    family = family_for(read_raw(config.model.path), config.model.path, mapped=False)
    count, kv_heads = family.shape.experts.count if family.shape.experts else 1, family.shape.kv_heads
    for parameter in family.parameters(Layout()):
        for number, source in enumerate(parameter.sources):
            owner, stages = _EXPERT.search(source.name), _stages(source.name, family.shape.layers, parallel.pipeline)
            ways = parallel.tensor * (1 if owner is None else parallel.data)
            cut: Cut | None = None
            if owner is not None and parallel.expert > 1:
                cut = Cut(((int(owner[1]) * ways // count,),))
            elif parameter.split is not None and len(source.shape) == 2:
                heads = kv_heads if len(parameter.sources) == 3 and number else 0  # keys and values of grouped-query attention
                padded = -(-source.shape[0] // _VOCABULARY) * _VOCABULARY if parameter.padded else 0
                cut = _even(padded or source.shape[parameter.split], parameter.split, ways, heads)
            elif len(source.shape) != 3:  # else a layer's experts in one tensor
                continue
            yield (source.name, source.shape), cut and _placed(cut, parallel, stages, copies=owner is None)


def _stages(name: str, layers: int, stages: int) -> Sequence[int]:
    """Return the pipeline stages that may need a tensor. Remaining layers are in the last stages but one, as vLLM has it."""
    found = _LAYER.search(name)
    if found is None:
        return sorted({0, stages - 1})
    each, more = divmod(layers, stages)
    sizes = [each + (stages - 1 - more <= stage < stages - 1) for stage in range(stages)]
    ends = list(accumulate(sizes))
    return [min(bisect_right(ends, int(found[1])), stages - 1)]


def _placed(cut: Cut, parallel: RolloutParallel, stages: Sequence[int], copies: bool) -> Cut:
    """Return a cut over the workers. `cut`: over the devices of a stage, or with `copies` those of each data-parallel rank."""
    ranks = range(parallel.data) if copies else range(1)

    def workers(device: int) -> Iterator[int]:
        for rank in ranks:
            data, tensor = (rank, device) if copies else divmod(device, parallel.tensor)
            yield from ((data * parallel.pipeline + stage) * parallel.tensor + tensor for stage in stages)

    holders = tuple(tuple(sorted(worker for device in part for worker in workers(device))) for part in cut.holders)
    return Cut(holders, cut.dim, cut.size)


def _even(length: int, dim: int, workers: int, heads: int) -> Cut | None:
    """Return an even cut. Of fewer `heads` than workers, neighbouring workers share one. None: the length does not divide."""
    parts = heads if 0 < heads < workers else workers
    if length % parts or workers % parts:
        return None
    each = workers // parts
    return Cut(tuple(tuple(range(part * each, (part + 1) * each)) for part in range(parts)), dim, length // parts)
