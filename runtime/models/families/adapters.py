"""Low-rank adapters (LoRA, arXiv:2106.09685, section 4.1) of a model, as ranks of megatron-core hold them.

Each matrix W [out, in] of Hugging Face has its own A [rank, in] and B [out, rank], even if several make one parameter of
megatron-core. If tensor parallelism cuts W by rows, it cuts B by rows, and each rank has A; if by columns, it cuts A.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from runtime.errors import UserError
from runtime.models.families.family import Family
from runtime.models.families.layout import Layout
from runtime.models.families.parameter import Parameter, SourceTensor

DOWN, UP = ".lora_A", ".lora_B"  # ends of names in a weight sync (`runtime.models.adapters`)
PREFIX = "base_model.model."  # of a tensor's name in PEFT's files
_ROUTERS = ("gate", "router")
_MATRIX = ".weight"

Pair = tuple[Parameter, Parameter]
"""A and B."""


def sync_name(name: str) -> str:
    """Return an adapter's name in a weight sync (`runtime.models.adapters`), given its name in PEFT's files."""
    module, _, end = name.removeprefix(PREFIX).removesuffix(_MATRIX).rpartition(".")
    return f"{module}{_MATRIX}.{end}"


class AdapterTable:
    """The parameters of a model's adapters, under PEFT's names, as `Family` has those of the model itself."""

    def __init__(self, family: Family, rank: int, targets: Sequence[str], layout: Layout):
        """Find the adapters. `targets`: as in `target_modules`; `layout` shards the model. Raises UserError if a layer does not
        exist, a rank has no adapters, or expert ranks of a stage have different numbers of them."""
        self._family, self._rank = family, rank
        sources = [source for each in family.parameters(Layout()) if _is_linear(each) for source in each.sources]
        self.targets = target_modules([source.name.removesuffix(_MATRIX) for source in sources], targets)
        for stage in range(layout.pipeline):
            counts = {len(self.parameters(layout, pipeline_rank=stage, expert_rank=rank)) for rank in range(layout.expert)}
            if counts == {0} or len(counts) > 1:
                raise UserError(
                    f"lora.target_modules: {self.targets} leaves ranks of pipeline stage {stage} with fewer adapters "
                    "than others have; must name layers of each stage, and all experts of a layer"
                )

    def parameters(self, layout: Layout, **coordinates: int) -> list[Parameter]:
        """Return all parameters of a rank, in the order of layers; `coordinates` as in `Family.parameters`."""
        held = self._family.parameters(layout, **coordinates)
        return [parameter for each in held for pair in self.pairs(each) if pair is not None for parameter in pair]

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the name and whole shape of each tensor."""
        return {source.name: source.shape for each in self.parameters(Layout()) for source in each.sources}

    def pairs(self, each: Parameter) -> list[Pair | None]:
        """Return the adapters of the matrices that make up `each`; None for a matrix without."""
        if not _is_linear(each):
            return []
        return [self._pair(each, number, source) for number, source in enumerate(each.sources)]

    def _pair(self, each: Parameter, number: int, source: SourceTensor) -> Pair | None:
        module = source.name.removesuffix(_MATRIX)
        if not is_target(module, self.targets):
            return None

        def part(name: str, kind: str, shape: tuple[int, int], split: int) -> Parameter:
            return Parameter(
                name=f"{each.name.removesuffix(_MATRIX)}.adapter.{name}.{number}",
                sources=(SourceTensor(f"{PREFIX}{module}.lora_{kind}{_MATRIX}", shape),),
                split=split if each.split == split else None,
                tensor=each.tensor,
                tensor_rank=each.tensor_rank,
                expert=each.expert,
            )

        rows, columns = source.shape
        return part("down", "A", (self._rank, columns), 1), part("up", "B", (rows, self._rank), 0)


def target_modules(layers: Iterable[str], wanted: Sequence[str]) -> list[str]:
    """Return the names by which adapters are put on linear `layers`: `wanted`, or all except routers; ends of layers' names.
    Raises UserError if a wanted layer does not exist."""
    found = list(layers)
    names = sorted({name.rpartition(".")[2] for name in found})
    for target in wanted:
        if not any(is_target(name, [target]) for name in found):
            raise UserError(
                f"lora.target_modules: {target!r} is no linear layer of the model; must be among {', '.join(names)}"
            )
    return sorted(wanted or set(names).difference(_ROUTERS))


def is_target(name: str, targets: Collection[str]) -> bool:
    """Return whether PEFT finds the layer `name` by one of `targets`: the whole name, or its end after a dot."""
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _is_linear(each: Parameter) -> bool:
    """Return whether `each` is a linear layer's weight; embedding, head and router have no adapters."""
    return each.name.startswith("decoder.layers.") and each.split is not None and len(each.sources[0].shape) == 2
