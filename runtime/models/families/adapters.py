"""Low-rank adapters (LoRA, arXiv:2106.09685, section 4.1) of a model, as ranks of megatron-core hold them.

Each matrix W [out, in] of Hugging Face's has its own A [rank, in] and B [out, rank], also where several make one parameter of
megatron-core. Where tensor parallelism cuts W by rows it cuts B so, and each rank has A; where by columns, the other way round.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from runtime.errors import UserError
from runtime.models.families.family import Family
from runtime.models.families.layout import Layout
from runtime.models.families.parameter import Parameter, SourceTensor

PREFIX = "base_model.model."  # of a tensor's name in PEFT's files
_ROUTERS = ("gate", "router")
_MATRIX = ".weight"

Pair = tuple[Parameter, Parameter]
"""A and B."""


def travelling(name: str) -> str:
    """By what name an adapter is published (`runtime.models.adapters`), from that in PEFT's files."""
    module, _, end = name.removeprefix(PREFIX).removesuffix(_MATRIX).rpartition(".")
    return f"{module}{_MATRIX}.{end}"


class AdapterTable:
    """Which parameters the adapters of a model are, in PEFT's names: what `Family` is for the model itself."""

    def __init__(self, family: Family, rank: int, targets: Sequence[str], layout: Layout):
        """`targets`: as of `target_modules`; `layout` divides the model. Raises UserError for a layer that there is not, and
        unless each rank has some, and expert ranks of a stage as many."""
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
        """All of a rank, in the order of the layers; `coordinates` as of `Family.parameters`."""
        held = self._family.parameters(layout, **coordinates)
        return [parameter for each in held for pair in self.pairs(each) if pair is not None for parameter in pair]

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of each, whole."""
        return {source.name: source.shape for each in self.parameters(Layout()) for source in each.sources}

    def pairs(self, each: Parameter) -> list[Pair | None]:
        """The adapters of the matrices that `each` is made of, None for one that has none."""
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
    """By which names adapters are put on `layers`, linear ones: `wanted`, or all but those of routers; the ends of their names.

    Raises UserError for a wanted one that there is not.
    """
    found = list(layers)
    names = sorted({name.rpartition(".")[2] for name in found})
    for target in wanted:
        if not any(is_target(name, [target]) for name in found):
            raise UserError(
                f"lora.target_modules: {target!r} is no linear layer of the model; must be among {', '.join(names)}"
            )
    return sorted(wanted or set(names).difference(_ROUTERS))


def is_target(name: str, targets: Collection[str]) -> bool:
    """Whether PEFT finds the layer `name` by one of `targets`: its name, or the end of it after a dot."""
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _is_linear(each: Parameter) -> bool:
    """Of a layer: the embedding and the head have no adapters, nor has a router."""
    return each.name.startswith("decoder.layers.") and each.split is not None and len(each.sources[0].shape) == 2
