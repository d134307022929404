"""The parts that decoder layers are made of: megatron-core's parameters, whole, and what makes each.

Names are relative to the layer: `decoder.layers.N.` at megatron-core (GPTModel with the local layer specification, experts in
a SequentialMLP), `model.layers.N.` at Hugging Face.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from runtime.models.families.parameter import SourceTensor
from runtime.models.families.shape import ModelShape


class ParameterMapping(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the mapping table."""

    name: str  # megatron-core's; `{expert}` stands for the expert's number on its rank
    sources: tuple[SourceTensor, ...]
    split: int | None = None  # dimension of the sources that tensor parallelism cuts
    groups: int = 1  # by which the sources are interleaved, all tensor ranks together; 1: they are concatenated
    expert: int | None = None  # its number in the layer


def norm(name: str, source: str, size: int) -> ParameterMapping:
    """Replicated, as is all that is not a large matrix."""
    return ParameterMapping(name=f"{name}.weight", sources=(SourceTensor(f"{source}.weight", (size,)),))


def attention(shape: ModelShape, *, bias: bool = False, qk_norm: bool = False) -> Iterator[ParameterMapping]:
    """Grouped-query attention with its norm. `bias`: of q, k and v."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    rows = {"q": q, "k": kv, "v": kv}
    yield norm("input_layernorm", "input_layernorm", shape.hidden_size)
    for kind in ("weight", "bias") if bias else ("weight",):
        tail = (shape.hidden_size,) if kind == "weight" else ()
        yield ParameterMapping(
            name=f"self_attention.linear_qkv.{kind}",
            sources=tuple(SourceTensor(f"self_attn.{part}_proj.{kind}", (size, *tail)) for part, size in rows.items()),
            split=0,
            groups=shape.kv_heads,
        )
    if qk_norm:
        for part in "qk":
            yield norm(f"self_attention.{part}_layernorm", f"self_attn.{part}_norm", shape.head_dim)
    yield _row_parallel("self_attention.linear_proj", "self_attn.o_proj", (shape.hidden_size, q))


def dense(shape: ModelShape) -> Iterator[ParameterMapping]:
    """A gated MLP with its norm."""
    yield norm("pre_mlp_layernorm", "post_attention_layernorm", shape.hidden_size)
    yield from _gated("mlp", "mlp", shape.hidden_size, shape.intermediate_size, None)


def experts(shape: ModelShape) -> Iterator[ParameterMapping]:
    """Routed experts, each a gated MLP, with their norm and router."""
    assert shape.experts is not None
    yield norm("pre_mlp_layernorm", "post_attention_layernorm", shape.hidden_size)
    yield ParameterMapping(
        name="mlp.router.weight", sources=(SourceTensor("mlp.gate.weight", (shape.experts.count, shape.hidden_size)),)
    )
    for expert in range(shape.experts.count):
        target, source = "mlp.experts.local_experts.{expert}", f"mlp.experts.{expert}"
        yield from _gated(target, source, shape.hidden_size, shape.experts.intermediate_size, expert)


def _gated(name: str, source: str, hidden: int, intermediate: int, expert: int | None) -> Iterator[ParameterMapping]:
    yield ParameterMapping(
        name=f"{name}.linear_fc1.weight",
        sources=tuple(SourceTensor(f"{source}.{part}_proj.weight", (intermediate, hidden)) for part in ("gate", "up")),
        split=0,
        expert=expert,
    )
    yield _row_parallel(f"{name}.linear_fc2", f"{source}.down_proj", (hidden, intermediate), expert)


def _row_parallel(name: str, source: str, shape: tuple[int, int], expert: int | None = None) -> ParameterMapping:
    return ParameterMapping(name=f"{name}.weight", sources=(SourceTensor(f"{source}.weight", shape),), split=1, expert=expert)
