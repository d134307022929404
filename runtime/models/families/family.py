"""The common part of model families: a decoder of layers between an embedding and a head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

import msgspec
from msgspec.structs import replace

from runtime.errors import UserError
from runtime.models.families.layout import Layout
from runtime.models.families.parameter import Parameter, SourceTensor
from runtime.models.families.shape import ModelShape, read_shape
from runtime.models.forward import ROUTER_BIAS

HEAD, WORDS = "output_layer.weight", "embedding.word_embeddings.weight"  # in megatron-core, for any kind of head
EMBEDDING, LM_HEAD, VALUE_HEAD = "model.embed_tokens.weight", "lm_head.weight", "score.weight"
SHOWN = 10  # wrong names that a message lists
_SUPPORTED = {"hidden_act": "silu", "mlp_bias": False, "use_sliding_window": False}  # of all families; they may override it


class Family:
    """One model of a family: its mapping between Hugging Face's tensors and megatron-core's parameters.

    A subclass defines how a layer differs from Llama's. The table is independent of ranks; `parameters` shards it for one rank.
    The converter, the loading and export of trainers, the weight sync and the embedded decoder share it:

    - load: for each of the rank's `parameters`, `from_hf` with a reader of Hugging Face tensors by name.
    - export and weight sync: for each that is no `copy`, gather its `pieces` over the tensor-parallel group, then `to_hf`.
      Stages hold different tensors, and so do expert ranks for their experts; each contributes its own.
    """

    model_type: ClassVar[str]  # in config.json
    architecture: ClassVar[str]  # the stem of its class names in transformers: "Qwen2" of Qwen2ForCausalLM
    unsupported: ClassVar[Mapping[str, Any]] = {}  # keys of config.json with their only supported value
    defaults: ClassVar[Mapping[str, Any]] = {}  # of optional keys of config.json, where Llama's differ
    unmapped: ClassVar[str] = ""  # its parts without a mapping to megatron-core; the table then has only names and shapes
    centred_norms: ClassVar[bool] = False  # norms multiply by 1 + their weight
    qkv_bias: ClassVar[bool] = False  # of the attention, whatever config.json says
    qk_norm: ClassVar[bool] = False  # each head of q and k is normalised

    def __init__(self, shape: ModelShape, value_head: bool = False):
        """Make the table of a model. `value_head`: one number a token instead of the language model's head."""
        self.shape, self.value_head = shape, value_head

    @classmethod
    def supported(cls, config: Mapping[str, Any], where: str) -> ModelShape:
        """Return the sizes in a config.json with the `defaults`. Raises UserError, also for an unsupported value."""
        for key, value in {**_SUPPORTED, **cls.unsupported}.items():
            if config.get(key, value) != value:
                raise UserError(f"{where}: {key} {config[key]!r} is not supported; must be {value!r}")
        bias = bool(config.get("attention_bias")) and not cls.qkv_bias
        return replace(cls.read(config, where), qkv_bias=cls.qkv_bias or bias, output_bias=bias, qk_norm=cls.qk_norm)

    @classmethod
    def read(cls, config: Mapping[str, Any], where: str) -> ModelShape:
        """Return the sizes. Raises UserError."""
        return read_shape(config, where)

    @classmethod
    def traits(cls, config: Mapping[str, Any], shape: ModelShape, where: str) -> dict[str, Any]:
        """Return fields of `hf_folder.ModelConfig` that differ from Llama's, except those of `shape`. Raises UserError."""
        return {}

    def layer(self, number: int) -> Iterator[ParameterMapping]:
        """Yield the table's rows for layer `number`, counted from 0."""
        yield from self.attention()
        has_experts = self.shape.experts is not None and number in self.shape.experts.layers
        yield from experts(self.shape) if has_experts else dense(self.shape)

    def attention(self) -> Iterator[ParameterMapping]:
        """Yield the rows of a layer's attention and of the norm before it."""
        return attention(self.shape)

    @property
    def tied(self) -> bool:
        """Whether the output layer is the embedding: one parameter, or a copy if they are on different pipeline stages."""
        return self.shape.tied and not self.value_head

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return name and shape of each Hugging Face tensor, in the order of the layers."""
        found: dict[str, tuple[int, ...]] = {}
        for parameter in self.parameters(Layout()):
            found.update((source.name, source.shape) for source in parameter.sources)
        return found

    def parameters(
        self, layout: Layout, *, tensor_rank: int = 0, pipeline_rank: int = 0, expert_rank: int = 0
    ) -> list[Parameter]:
        """Return all parameters of a rank, in the order of layers. `layout` must suit the model (`layout.require(shape)`)."""
        return [
            *self._ends(layout, tensor_rank, pipeline_rank, first=True),
            *self._layers(layout, tensor_rank, pipeline_rank, expert_rank),
            *self._ends(layout, tensor_rank, pipeline_rank, first=False),
        ]

    def require_tensors(self, found: Mapping[str, tuple[int, ...]], where: str) -> None:
        """Check that the tensors `found`, names and shapes, are exactly this model's. Raises UserError if not. With a value
        head, the language model's head is ignored, and the value head may be missing: it begins at 0. A tied model may have a
        stored head."""
        left_out = {LM_HEAD} if self.value_head or self.tied else set()
        given = {VALUE_HEAD} if self.value_head else set()
        needed = {name: shape for name, shape in self.tensors().items() if name in found or name not in given}
        require_same(where, needed, {name: shape for name, shape in found.items() if name in needed or name not in left_out})

    def _layers(self, layout: Layout, tensor_rank: int, pipeline_rank: int, expert_rank: int) -> Iterator[Parameter]:
        count = self.shape.experts.count if self.shape.experts else 0
        held = layout.expert_range(count, expert_rank)
        for local, number in enumerate(layout.stage_layers(self.shape, pipeline_rank)):
            for entry in self.layer(number):
                if entry.expert is not None and entry.expert not in held:
                    continue
                name = entry.name if entry.expert is None else entry.name.format(expert=entry.expert - held.start)
                whole = entry.expert is not None and layout.whole_experts
                yield Parameter(
                    name=f"decoder.layers.{local}.{name}",
                    sources=tuple(
                        SourceTensor(f"model.layers.{number}.{source.name}", source.shape) for source in entry.sources
                    ),
                    split=entry.split,
                    groups=1 if entry.groups == 1 else entry.groups // layout.tensor,
                    tensor=1 if whole else layout.tensor,
                    tensor_rank=0 if whole else tensor_rank,
                    expert=entry.expert is not None,
                )

    def _ends(self, layout: Layout, tensor_rank: int, pipeline_rank: int, *, first: bool) -> Iterator[Parameter]:
        """Yield the parameters before the layers, or after them."""
        last_stage, hidden = layout.pipeline - 1, self.shape.hidden_size
        held = partial(Parameter, tensor=layout.tensor, tensor_rank=tensor_rank)
        vocabulary = partial(held, split=0, padded=layout.padded_vocab(self.shape))
        embedding, head = (SourceTensor(name, (self.shape.vocab_size, hidden)) for name in (EMBEDDING, LM_HEAD))
        final, values = SourceTensor("model.norm.weight", (hidden,)), SourceTensor(VALUE_HEAD, (1, hidden))
        if first:
            if pipeline_rank == 0:
                yield vocabulary(name=WORDS, sources=(embedding,))
        elif pipeline_rank == last_stage:
            yield held(name="decoder.final_layernorm.weight", sources=(final,), split=None)
            if self.value_head:
                yield held(name=HEAD, sources=(values,), split=None)
            elif not self.tied:
                yield vocabulary(name=HEAD, sources=(head,))
            elif last_stage > 0:
                yield vocabulary(name=HEAD, sources=(embedding,), copy=True)


def require_same(where: str, needed: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> None:
    """Check that names and shapes are the same. Raises UserError with a line for each kind of fault and the first names."""
    faults = {
        "missing": [name for name in needed if name not in found],
        "unexpected": [name for name in found if name not in needed],
        "of another shape": [
            f"{name} {list(found[name])} instead of {list(shape)}"
            for name, shape in needed.items()
            if found.get(name, shape) != shape
        ],
    }
    lines = [
        f"{where}: {len(names)} tensors are {kind}: {', '.join(names[:SHOWN])}{', ...' if len(names) > SHOWN else ''}"
        for kind, names in faults.items()
        if names
    ]
    if lines:
        raise UserError("\n".join(lines))


# ----------------------------------------------------------------------------------------------------------------------
# The parts of decoder layers: megatron-core's whole parameters, and the sources of each.
#
# Names are relative to the layer: `decoder.layers.N.` in megatron-core (GPTModel with the local layer specification, experts in
# a SequentialMLP), `model.layers.N.` in Hugging Face.


class ParameterMapping(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the mapping table."""

    name: str  # megatron-core's; `{expert}` stands for the expert's number on its rank
    sources: tuple[SourceTensor, ...]
    field: str  # of the embedded decoder's `LayerWeights`, which may join several rows
    split: int | None = None  # dimension of the sources that tensor parallelism cuts
    groups: int = 1  # by which the sources are interleaved, on all tensor ranks together; 1: they are concatenated
    expert: int | None = None  # its number in the layer


def row(
    field: str, name: str, source: str, shape: tuple[int, ...], split: int | None = None, expert: int | None = None
) -> ParameterMapping:
    """Return the row of a parameter that is one tensor. Without `split` it is replicated, as all but large matrices are."""
    return ParameterMapping(field=field, name=name, sources=(SourceTensor(source, shape),), split=split, expert=expert)


def norm(field: str, name: str, source: str, size: int) -> ParameterMapping:
    return row(field, f"{name}.weight", f"{source}.weight", (size,))


def attention(shape: ModelShape) -> Iterator[ParameterMapping]:
    """Yield the rows of grouped-query attention and its norm."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    rows = {"q": q, "k": kv, "v": kv}
    yield norm("input_norm", "input_layernorm", "input_layernorm", shape.hidden_size)
    for kind in ("weight", "bias") if shape.qkv_bias else ("weight",):
        tail = (shape.hidden_size,) if kind == "weight" else ()
        yield ParameterMapping(
            field="qkv" if kind == "weight" else "qkv_bias",
            name=f"self_attention.linear_qkv.{kind}",
            sources=tuple(SourceTensor(f"self_attn.{part}_proj.{kind}", (size, *tail)) for part, size in rows.items()),
            split=0,
            groups=shape.kv_heads,
        )
    if shape.qk_norm:
        for part in "qk":
            yield norm("qk_norm", f"self_attention.{part}_layernorm", f"self_attn.{part}_norm", shape.head_dim)
    yield row("output", "self_attention.linear_proj.weight", "self_attn.o_proj.weight", (shape.hidden_size, q), split=1)
    if shape.output_bias:
        yield row("output_bias", "self_attention.linear_proj.bias", "self_attn.o_proj.bias", (shape.hidden_size,))


def dense(shape: ModelShape, before: str = "post_attention_layernorm") -> Iterator[ParameterMapping]:
    """Yield the rows of a gated MLP and its norm, which Hugging Face names `before`."""
    yield norm("mlp_norm", "pre_mlp_layernorm", before, shape.hidden_size)
    yield from gated("mlp", "mlp", shape.hidden_size, shape.intermediate_size)


def experts(shape: ModelShape) -> Iterator[ParameterMapping]:
    """Yield the rows of routed experts, each a gated MLP, with norm, router, score correction, and shared experts."""
    experts, hidden = shape.experts, shape.hidden_size
    assert experts is not None
    yield norm("mlp_norm", "pre_mlp_layernorm", "post_attention_layernorm", hidden)
    yield row("router", "mlp.router.weight", f"{experts.block}.gate.weight", (experts.count, hidden))
    for expert in range(experts.count):
        target, source = "mlp.experts.local_experts.{expert}", f"{experts.block}.experts.{expert}"
        yield from gated(target, source, hidden, experts.intermediate_size, expert, experts.parts)
    if experts.corrected:
        yield row("score_bias", "mlp.router.expert_bias", f"mlp.gate.{ROUTER_BIAS}", (experts.count,))
    if experts.shared_size:
        yield from gated("mlp.shared_experts", "mlp.shared_experts", hidden, experts.shared_size, prefix="shared_")


def gated(
    name: str,
    source: str,
    hidden: int,
    intermediate: int,
    expert: int | None = None,
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    prefix: str = "",
) -> Iterator[ParameterMapping]:
    *inner, down = parts
    yield ParameterMapping(
        field=f"{prefix}gate_up",
        name=f"{name}.linear_fc1.weight",
        sources=tuple(SourceTensor(f"{source}.{part}.weight", (intermediate, hidden)) for part in inner),
        split=0,
        expert=expert,
    )
    yield row(f"{prefix}down", f"{name}.linear_fc2.weight", f"{source}.{down}.weight", (hidden, intermediate), 1, expert)
