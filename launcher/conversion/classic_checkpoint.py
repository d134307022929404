"""The model in a checkpoint of Megatron-LM's own layout: each parameter of each rank by the name that the table has for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec.structs import replace

from launcher.conversion.check import ParameterReader
from launcher.conversion.classic_folder import RankFiles
from launcher.conversion.torch_archive import ArchiveTensor
from runtime.errors import UserError
from runtime.models.families import Family, Layout, Parameter
from runtime.models.families.family import HEAD, WORDS, require_same
from runtime.models.families.naming import (
    REWARD_BIAS,
    REWARD_HEAD,
    LatentStorage,
    Place,
    latent_stored,
    places,
    reward_headed,
)
from runtime.models.families.parameter import Sliceable
from runtime.trainer.megatron.core_folder import Column, CoreFile, columns
from runtime.weights.plan import TensorSpec


def has_value_head(ranks: RankFiles) -> bool:
    """Whether the model gives one number a token: by MindSpeed's reward head, or in the place of the vocabulary's head."""
    _, last = ranks.stored(0, ranks.stages - 1, 0)
    return REWARD_HEAD in last or (HEAD in last and last[HEAD].shape[:1] == (1,))


def layout_of(ranks: RankFiles, vocab_size: int) -> Layout:
    """Raises UserError when the layers have gaps, and when the vocabulary is larger than what is stored."""
    tensor = ranks.grid.tensor
    path, stored = ranks.stored(0, 0, 0)
    rows = stored[WORDS].shape[0] if WORDS in stored and stored[WORDS].shape else 0
    if 0 < rows * tensor < vocab_size:
        raise UserError(
            f"{path}: {WORDS} has {rows} rows on each of {tensor} ranks; must be at least vocab_size {vocab_size} in all"
        )
    return Layout(
        tensor=tensor,
        pipeline=ranks.stages,
        expert=ranks.grid.groups,
        whole_experts=ranks.grid.whole_experts,
        empty_stages=True,
        layers_per_stage=ranks.layers_per_stage(),
        make_vocab_size_divisible_by=max(rows, 1),
    )


class ClassicCheckpoint:
    """All ranks' files, of which no tensor is read yet."""

    def __init__(self, ranks: RankFiles, family: Family):
        """Raises UserError, naming the tensors, when a file is of another model, and for a reward head with a bias."""
        layout = layout_of(ranks, family.shape.vocab_size)
        layout.require(family.shape)
        _, last = ranks.stored(0, ranks.stages - 1, 0)
        reward = REWARD_HEAD in last
        self.left_out = [HEAD] if reward and HEAD in last else []
        storage = _latent_storage(ranks, family)
        held = [_of_parts(column, lambda held: latent_stored(held, storage)) for column in columns(family, layout)]
        self.columns = [_of_parts(column, lambda held: list(map(reward_headed, held))) for column in held] if reward else held
        self._holders: dict[str, list[RankReader]] = {}  # of each part, the ranks that have it
        of_stages: dict[int, list[CoreFile]] = {}
        for column in self.columns:
            of_stages.setdefault(column.parts[0].stage, []).extend(column.parts)
        for rank, stage in ((rank, stage) for stage in of_stages for rank in ranks.grid.ranks()):
            if stage % ranks.grid.pipeline == rank[1]:
                path, stored = ranks.stored(rank[0], stage, rank[2])
                parts = [part for part in of_stages[stage] if ranks.grid.holds(rank, part)]
                reader = RankReader(path, stored, parts, {HEAD, REWARD_BIAS} if reward else set())
                _require_zero(path, stored.get(REWARD_BIAS))
                for part in parts:
                    self._holders.setdefault(part.name, []).append(reader)

    def part(self, part: CoreFile) -> RankReader:
        return self._holders[part.name][0]

    def copies(self) -> Iterator[tuple[Parameter, ParameterReader]]:
        """What further ranks hold of the same."""
        for part in (part for column in self.columns for part in column.parts):
            for reader in self._holders[part.name][1:]:
                yield from ((replace(parameter, copy=True), reader) for parameter in part.parameters)


def _of_parts(column: Column, change: Callable[[list[Parameter]], list[Parameter]]) -> Column:
    return Column([replace(part, parameters=change(part.parameters)) for part in column.parts])


def _latent_storage(ranks: RankFiles, family: Family) -> LatentStorage:
    """By the names and shapes of the first rank's tensors on the first stage that has layers."""
    latent = family.shape.latent
    for stage in range(ranks.stages if latent is not None else 0):
        _, stored = ranks.stored(0, stage, 0)
        for name, tensor in stored.items():
            if name.endswith("self_attention.linear_qkv.weight"):
                return LatentStorage.JOINED
            if latent is not None and name.endswith("linear_kv_down_proj.weight"):
                return LatentStorage.WHOLE if tensor.shape[:1] == (latent.cached,) else LatentStorage.CUT
    return LatentStorage.CUT


class RankReader:
    """What one rank holds of one stage. Conversion asks for parameters by the table's names."""

    def __init__(self, path: Path, stored: dict[str, ArchiveTensor], parts: list[CoreFile], beside: set[str]):
        """`beside`: names that there may be as well. Raises UserError, naming the tensors, unless they are those of `parts`."""
        parameters = [parameter for part in parts for parameter in part.parameters]
        self.path = path
        self.specs: dict[str, TensorSpec] = {}
        self._tensors: dict[str, ArchiveTensor] = {}
        found: dict[str, tuple[int, ...]] = {}
        used: set[str] = set()
        experts = Counter(parameter.name.partition(".local_experts.")[0] for parameter in parameters if parameter.expert)
        for parameter in parameters:
            place = next((place for _, place in places(parameter.name) if place.name in stored), None)
            if place is None:
                continue
            used.add(place.name)
            count = experts[parameter.name.partition(".local_experts.")[0]] // 2  # two matrices each
            tensor = stored[place.name] if place.expert is None else _expert(stored[place.name], place, count, parameter)
            found[parameter.name] = tensor.shape
            self._tensors[parameter.name] = tensor
            self.specs[parameter.name] = TensorSpec(parameter.name, tensor.dtype, tensor.shape)
        found |= {name: tensor.shape for name, tensor in stored.items() if name not in used and name not in beside}
        require_same(str(path), {parameter.name: parameter.shape for parameter in parameters}, found)

    def get(self, name: str) -> Sliceable:
        return self._tensors[name]


def _expert(stored: ArchiveTensor, place: Place, count: int, parameter: Parameter) -> ArchiveTensor:
    """One of the `count` experts of a rank, each of which has an equal part of the tensor's elements."""
    rows, width = parameter.shape
    if stored.elements != count * rows * width:
        return stored
    assert place.expert is not None
    return stored.part(place.expert * rows * width, (rows, width), transposed=True)


def _require_zero(path: Path, bias: ArchiveTensor | None) -> None:
    """Hugging Face's classifiers have a head without a bias."""
    if bias is not None and bias.shape != (1,):
        raise UserError(f"{path}: {REWARD_BIAS} has the shape {list(bias.shape)}; must be [1]")
    if bias is not None and (value := bias[:].tolist()) != [0.0]:
        raise UserError(f"{path}: {REWARD_BIAS} is {value}; must be 0, as a Hugging Face classifier's head has no bias")
