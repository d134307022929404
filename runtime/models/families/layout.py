"""How megatron-core shards a model: tensor, pipeline and expert parallelism, as far as they decide what a rank holds."""

from __future__ import annotations

import msgspec

from runtime.errors import UserError
from runtime.models.families.shape import ModelShape


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a sharding. With a rank's three coordinates (tensor, pipeline and expert rank) they decide what the rank holds.

    Data and context parallelism are not part of it: such ranks hold the same parameters. Tensor parallelism also shards each
    expert (megatron-core's default: expert tensor parallelism equals tensor parallelism). Expert ranks are then some of the
    data-parallel ranks, and the three coordinates are independent. With `whole_experts` experts are not sharded, and `expert`
    is the number of groups that hold them, of any ranks.
    """

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    layers_per_stage: tuple[int, ...] = ()  # for each pipeline stage; (): the same number for all
    make_vocab_size_divisible_by: int = 1  # the padded vocabulary is a multiple of this times `tensor`
    whole_experts: bool = False
    empty_stages: bool = False  # `layers_per_stage` may be 0: MindSpeed has layers that only forward tokens

    def stage_layers(self, shape: ModelShape, pipeline_rank: int) -> range:
        """Return the model's layers on a stage."""
        counts = self.layers_per_stage or (shape.layers // self.pipeline,) * self.pipeline
        first = sum(counts[:pipeline_rank])
        return range(first, first + counts[pipeline_rank])

    def padded_vocab(self, shape: ModelShape) -> int:
        """Return the rows of the embedding and of the output layer, on all tensor ranks together. Padding rows are 0. Their
        logits are 0 too, not minus infinity: a softmax must leave them out."""
        multiple = self.make_vocab_size_divisible_by * self.tensor
        return -(-shape.vocab_size // multiple) * multiple

    def expert_range(self, count: int, expert_rank: int) -> range:
        """Return the experts of a layer on an expert rank."""
        each = count // self.expert
        return range(expert_rank * each, (expert_rank + 1) * each)

    def require(self, shape: ModelShape) -> None:
        """Check that this layout suits the model. Raises UserError, with a line for each dimension that it does not divide."""
        if faults := self.faults(shape):
            raise UserError("\n".join(faults))

    def faults(self, shape: ModelShape) -> list[str]:
        """Return why a model of this shape cannot have this layout, one fault a line."""
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
        start = f"layers per stage are {','.join(map(str, counts))}; must be"
        if len(counts) != self.pipeline:
            return [f"{start} as many numbers as pipeline parallel ({self.pipeline})"]
        if min(counts) < (0 if self.empty_stages else 1) or sum(counts) != shape.layers:
            return [f"{start} positive and add up to the layers ({shape.layers})"]
        return []

    def _expert_faults(self, shape: ModelShape) -> list[str]:
        if shape.experts is None:
            return [f"expert parallel is {self.expert}; must be 1 for a model without experts"] if self.expert > 1 else []
        if shape.experts.count % self.expert:
            return [f"expert parallel is {self.expert}; must divide the experts of a layer ({shape.experts.count})"]
        return []
