"""How megatron-core cuts a model up: tensor, pipeline and expert parallelism, as far as it decides what a rank holds."""

from __future__ import annotations

import msgspec

from runtime.errors import UserError
from runtime.models.families.shape import ModelShape


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank holds follows from this and its three coordinates (tensor, pipeline and expert rank).

    Data and context parallelism are no part of it: such ranks hold the same parameters. Experts are cut over tensor
    parallelism as well (megatron-core's default: expert tensor parallelism equals tensor parallelism), so expert ranks are
    some of the data-parallel ones, and the three coordinates are independent. With `whole_experts` they are not cut, and
    `expert` are the groups that they are spread over, whichever ranks those are.
    """

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    layers_per_stage: tuple[int, ...] = ()  # of each pipeline stage; (): the same number for all
    make_vocab_size_divisible_by: int = 1  # the padded vocabulary is a multiple of this times `tensor`
    whole_experts: bool = False
    empty_stages: bool = False  # `layers_per_stage` may be 0: MindSpeed has layers that only pass tokens on

    def stage_layers(self, shape: ModelShape, pipeline_rank: int) -> range:
        """The model's layers that lie on a stage."""
        counts = self.layers_per_stage or (shape.layers // self.pipeline,) * self.pipeline
        first = sum(counts[:pipeline_rank])
        return range(first, first + counts[pipeline_rank])

    def padded_vocab(self, shape: ModelShape) -> int:
        """Rows of the embedding and of the output layer, all tensor ranks together. Those past the vocabulary are 0.

        Their logits are 0 too, not minus infinity: a softmax has to leave them out.
        """
        multiple = self.make_vocab_size_divisible_by * self.tensor
        return -(-shape.vocab_size // multiple) * multiple

    def expert_range(self, count: int, expert_rank: int) -> range:
        """The experts of a layer that lie on an expert rank."""
        each = count // self.expert
        return range(expert_rank * each, (expert_rank + 1) * each)

    def require(self, shape: ModelShape) -> None:
        """Raises UserError, a line for each dimension of the model that this layout does not divide."""
        if faults := self.faults(shape):
            raise UserError("\n".join(faults))

    def faults(self, shape: ModelShape) -> list[str]:
        """What keeps a model of this shape from being laid out so; a line each."""
        sizes = {
            "tensor parallel": self.tensor,
            "pipeline parallel": self.pipeline,
            "expert parallel": self.expert,
            "make_vocab_size_divisible_by": self.make_vocab_size_divisible_by,
        }
        if wrong := [f"{name} is {size}; must be at least 1" for name, size in sizes.items() if size < 1]:
            return wrong
        return [*self._tensor_faults(shape), *self._pipeline_faults(shape), *self._expert_faults(shape)]

    def _tensor_faults(self, shape: ModelShape) -> list[str]:
        sizes = {"attention heads": shape.heads, "key-value heads": shape.kv_heads}
        if shape.latent is not None:
            sizes |= {"q_lora_rank": shape.latent.query_rank or 0, "kv_lora_rank and qk_rope_head_dim": shape.latent.cached}
        if shape.experts is None or len(shape.experts.layers) < shape.layers:
            sizes["the intermediate size"] = shape.intermediate_size
        if shape.experts is not None and shape.experts.shared_size:
            sizes["the shared experts' intermediate size"] = shape.experts.shared_size
        if shape.experts is not None and not self.whole_experts:
            sizes["the experts' intermediate size"] = shape.experts.intermediate_size
        return [
            f"tensor parallel is {self.tensor}; must divide {name} ({size})"
            for name, size in sizes.items()
            if size % self.tensor
        ]

    def _pipeline_faults(self, shape: ModelShape) -> list[str]:
        counts = self.layers_per_stage
        if not counts:
            if shape.layers % self.pipeline:
                return [
                    f"pipeline parallel is {self.pipeline}; must divide the layers ({shape.layers}), or give layers per stage"
                ]
            return []
        told = f"layers per stage are {','.join(map(str, counts))}; must be"
        if len(counts) != self.pipeline:
            return [f"{told} as many numbers as pipeline parallel ({self.pipeline})"]
        if min(counts) < (0 if self.empty_stages else 1) or sum(counts) != shape.layers:
            return [f"{told} positive and add up to the layers ({shape.layers})"]
        return []

    def _expert_faults(self, shape: ModelShape) -> list[str]:
        if shape.experts is None:
            return [f"expert parallel is {self.expert}; must be 1 for a model without experts"] if self.expert > 1 else []
        if shape.experts.count % self.expert:
            return [f"expert parallel is {self.expert}; must divide the experts of a layer ({shape.experts.count})"]
        return []
