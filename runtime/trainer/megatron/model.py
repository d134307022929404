"""A GPTModel of megatron-core, built from a Hugging Face description, for packed sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import MLATransformerConfig, ModuleSpec, TransformerConfig
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from runtime.config import Spread, Trainer
from runtime.errors import UserError
from runtime.models.families.shape import LATENT_EPS, ExpertShape
from runtime.models.forward import packed_attention
from runtime.models.hf_folder import ModelConfig
from runtime.trainer.megatron.experts import LayerInputs, Routing
from runtime.trainer.micro_batch import MicroBatch

# ---- Latent: multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) on megatron-core, for packed sequences.
# The parameters are those of megatron-core's `MLASelfAttention`. Its forward pass supports only positions that count from 0,
# and no attention bias. If tensor parallelism cuts the down-projections, its gradient of the keys' shared part is incomplete:
# each rank has the gradient of its own heads only.


class LatentSelfAttention(MLASelfAttention):
    """`rotary_pos_emb` are cosines and sines [2, T, 1, 1, rotated], already multiplied by the rope's amplitude."""

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: None, *, rotary_pos_emb: torch.Tensor, attention_bias: Any, **_: Any
    ) -> tuple[torch.Tensor, None]:
        """Compute attention: [T, 1, H] (with sequence parallelism a part of it) -> the same, and no bias."""
        config: Any = self.config
        if config.q_lora_rank is None:
            query, _bias = self.linear_q_proj(hidden_states)
        else:
            compressed = self._part_of_sequence(self._whole(self.linear_q_down_proj, hidden_states))
            query, _bias = self.linear_q_up_proj(self.q_layernorm(compressed))
        plain, turned = self._heads(query).split((config.qk_head_dim, config.qk_pos_emb_head_dim), -1)
        query = torch.cat((plain, _rotated(turned, *rotary_pos_emb)), -1)

        entries = self._whole(self.linear_kv_down_proj, hidden_states)
        latent, shared = entries.split((config.kv_lora_rank, config.qk_pos_emb_head_dim), -1)
        # All ranks' heads use the shared part, and its gradient is the sum of theirs.
        shared = tensor_parallel.copy_to_tensor_model_parallel_region(shared)
        turned = _rotated(shared.unsqueeze(2), *rotary_pos_emb)
        made, _bias = self.linear_kv_up_proj(self.kv_layernorm(self._part_of_sequence(latent)))
        plain, value = self._heads(made).split((config.qk_head_dim, config.v_head_dim), -1)
        key = torch.cat((plain, turned.expand(-1, -1, plain.shape[2], -1)), -1)

        output, _bias = self.linear_proj(self.core_attention(query, key, value, None, attention_bias=attention_bias))
        return output, None

    def _whole(self, down: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """Return a down-projection of all tokens, [T, 1, width]. The projection's rows are sharded over the ranks."""
        part, _bias = down(hidden)
        whole: torch.Tensor = tensor_parallel.gather_from_tensor_model_parallel_region(part)
        return whole

    def _part_of_sequence(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's tokens; without sequence parallelism all tokens."""
        if not self.config.sequence_parallel:
            return whole
        part: torch.Tensor = tensor_parallel.scatter_to_sequence_parallel_region(whole)
        return part

    def _heads(self, projected: torch.Tensor) -> torch.Tensor:
        """Return `projected` as [T, 1, heads of this rank, d]."""
        return projected.unflatten(-1, (self.num_attention_heads_per_partition, -1))


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate `x` [T, 1, n, rotated], whose pairs are neighbours. The result's pairs are halves, for queries and keys alike."""
    first, second = x[..., 0::2], x[..., 1::2]
    rotated = torch.cat((first, second), -1) * cos + torch.cat((-second, first), -1) * sin
    return rotated.to(x.dtype)


class Norm(torch.nn.RMSNorm):
    """torch's RMSNorm with the arguments of a layer specification: megatron-core's own rejects sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any):
        super().__init__(hidden_size, eps=eps)
        # Its gradient is summed over the tensor-parallel ranks, as each rank saw a part of the sequence.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class LatentNorm(Norm):
    """The norm in latent attention."""

    def __init__(self, config: TransformerConfig, hidden_size: int, **_: Any):
        super().__init__(config, hidden_size, LATENT_EPS)


class PackedAttention(torch.nn.Module):
    """The core attention. The packing arrives with the attention bias (`LayerInputs`). Context-parallel ranks have T tokens
    each, and gather their keys and values, whose gradients are summed over the ranks."""

    def __init__(self, *_: Any, scaling: float, window: int, **__: Any):
        """Set up the attention. `scaling`: factor of the scores. `window`: tokens in reach, its own included; 0: all."""
        super().__init__()
        self._options: dict[str, Any] = {"scaling": scaling, "sliding_window": window or None}
        self._group = parallel_state.get_context_parallel_group()

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _mask: None, *, attention_bias: Any, **_: Any
    ) -> torch.Tensor:
        """Attend: [T, 1, heads, d] each, key and value with fewer heads -> [T, 1, heads · d]."""
        if self._group.size() > 1:
            both, widths = torch.cat((key, value), -1), (key.shape[-1], value.shape[-1])
            key, value = tensor_parallel.gather_from_sequence_parallel_region(both, group=self._group).split(widths, -1)
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        output, _weights = packed_attention(self, query, key, value, None, packing=attention_bias.packing, **self._options)
        return output[0].flatten(1).unsqueeze(1)


class PackedModel(GPTModel):
    """This rank's part of the model. It takes a micro-batch and returns the input of the next stage. The last stage returns the
    head's input at the predictors of the trained tokens, [N, H]; with a value head, values [N]."""

    def __init__(self, shape: ModelConfig, settings: Spread, dtype: torch.dtype, padded_vocabulary: int, value_head: bool):
        config = transformer_config(shape, settings, dtype)
        super().__init__(
            config,
            TransformerBlockSubmodules(layer_specs=_layers(config, shape), layer_norm=Norm),
            vocab_size=padded_vocabulary,
            max_sequence_length=shape.max_positions,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            parallel_output=True,
            share_embeddings_and_output_weights=shape.tied and not value_head,
            position_embedding_type="none",
        )
        share = padded_vocabulary // config.tensor_model_parallel_size
        self.vocabulary_start = share * parallel_state.get_tensor_model_parallel_rank()
        self._vocabulary_share = min(share, max(0, shape.vocab_size - self.vocabulary_start))  # without padding
        self._value_head = value_head
        if value_head and self.post_process:
            self.output_layer = torch.nn.Linear(config.hidden_size, 1, bias=False)
        self._frequencies = shape.rope.frequencies(shape.rotary_dim or shape.head_dim)
        self._amplitude = None if shape.latent is None else shape.rope.amplitude  # otherwise part of the attention's scaling

    def forward(self, batch: MicroBatch, routing: Routing | None = None) -> torch.Tensor:
        hidden = None
        if self.pre_process:
            hidden = self.embedding(input_ids=batch.input_ids, position_ids=batch.position_ids)
            if torch.is_grad_enabled():  # with an embedding that is not trained, recomputation would skip the gradients
                hidden.requires_grad_()
        hidden = self.decoder(
            hidden_states=hidden,
            attention_mask=None,
            rotary_pos_emb=self._angles(batch.position_ids[0]),
            attention_bias=LayerInputs(batch.packing, routing),
        )
        if not self.post_process:
            return hidden
        return self._values(hidden, batch.predictors) if self._value_head else self._chosen(hidden, batch.predictors)

    def _angles(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the angles [T, 1, 1, head_dim]; for latent attention, their cosines and sines. A reply's positions go on from
        its prompt's, wherever the prompt is packed."""
        angles = torch.outer(positions.float(), self._frequencies.to(positions.device))
        twice = torch.cat((angles, angles), -1)[:, None, None]
        return twice if self._amplitude is None else torch.stack((twice.cos(), twice.sin())) * self._amplitude

    def _chosen(self, hidden: torch.Tensor, predictors: torch.Tensor) -> torch.Tensor:
        if self.config.sequence_parallel:
            whole = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
            return whole[:, 0].index_select(0, predictors)
        chosen: torch.Tensor = tensor_parallel.copy_to_tensor_model_parallel_region(hidden[:, 0].index_select(0, predictors))
        return chosen

    def head_weight(self) -> torch.Tensor:
        """Return the head's weight [v, H] of this rank's part of the vocabulary. Last stage only."""
        weight: torch.Tensor = self.output_layer.weight
        if self.pre_process and self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
        return weight[: self._vocabulary_share]

    def _values(self, hidden: torch.Tensor, predictors: torch.Tensor) -> torch.Tensor:
        """Return the values, float32, the same on every tensor-parallel rank."""
        if self.config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        values: torch.Tensor = self.output_layer(hidden[:, 0].index_select(0, predictors))
        return values[:, 0].float()


def _layers(config: TransformerConfig, shape: ModelConfig) -> list[ModuleSpec]:
    """Return the layers of this rank's stage."""
    sparse: Any = config.moe_layer_freq if config.num_moe_experts else [0] * config.num_layers
    kinds = list(zip(sparse, shape.windows or [0] * shape.layers, strict=True))
    made = {(has, window): _layer(config, shape, config.num_moe_experts if has else None, window) for has, window in set(kinds)}
    first = get_transformer_layer_offset(config)
    return [made[kind] for kind in kinds[first : first + get_num_layers_to_build(config)]]


def _layer(config: TransformerConfig, shape: ModelConfig, experts: int | None, window: int) -> ModuleSpec:
    latent = shape.latent is not None
    spec = get_gpt_layer_local_spec(
        num_experts=experts, normalization="RMSNorm", qk_layernorm=config.qk_layernorm, multi_latent_attention=latent
    )
    parts: Any = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = Norm
    if shape.rotary_dim and shape.rope.amplitude != 1.0:
        raise UserError("model.path: rope_type yarn with partial_rotary_factor is not supported with megatron-core")
    # The amplitude multiplies cosines and sines, in queries and in keys.
    scaling = shape.score_scale or shape.head_dim**-0.5 * shape.rope.amplitude**2
    options = {"scaling": scaling, "window": window}
    parts.self_attention.submodules.core_attention = ModuleSpec(PackedAttention, params=options)
    if latent:
        parts.self_attention.module = LatentSelfAttention
        parts.self_attention.submodules.q_layernorm = parts.self_attention.submodules.kv_layernorm = LatentNorm
    if config.qk_layernorm:
        parts.self_attention.submodules.q_layernorm = parts.self_attention.submodules.k_layernorm = Norm
    return spec


def _stages(layers: Sequence[int]) -> dict[str, Any]:
    """Return the options for stages of different sizes. Middle stages are alike; of two stages, the last has the rest."""
    if len(layers) < 2:
        return {}
    last = {"num_layers_in_last_pipeline_stage": layers[-1]} if len(layers) > 2 else {}
    return {"num_layers_in_first_pipeline_stage": layers[0], **last}


def transformer_config(shape: ModelConfig, settings: Spread, dtype: torch.dtype) -> TransformerConfig:
    """Return megatron-core's configuration of a model of this shape."""
    parallel = settings.parallel
    options: dict[str, Any] = {}
    if isinstance(settings, Trainer) and settings.activation_checkpointing:
        options |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if shape.experts is not None:
        options |= _routing(shape.experts, shape.layers, parallel.expert)
    if shape.latent is not None:
        options |= {
            "q_lora_rank": shape.latent.query_rank,
            "kv_lora_rank": shape.latent.rank,
            "qk_head_dim": shape.latent.plain,
            "qk_pos_emb_head_dim": shape.latent.rotated,
            "v_head_dim": shape.latent.value,
            "rope_type": "rope",  # rotation is not done by megatron-core
        }
    kind: type[TransformerConfig] = TransformerConfig if shape.latent is None else MLATransformerConfig
    return kind(
        num_layers=shape.layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.intermediate_size,
        num_attention_heads=shape.heads,
        num_query_groups=shape.heads if shape.latent else shape.kv_heads,
        kv_channels=shape.head_dim,
        layernorm_epsilon=shape.norm_eps,
        qk_layernorm=shape.qk_norm,
        add_qkv_bias=shape.qkv_bias,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        context_parallel_size=parallel.context,
        **_stages(parallel.layers_per_stage),
        sequence_parallel=parallel.sequence,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        variable_seq_lengths=True,  # every micro-batch has its own length
        moe_token_dispatcher_type="alltoall",  # needed for variable lengths
        calculate_per_token_loss=True,  # gradients are sums; the step divides them
        batch_p2p_sync=False,
        deallocate_pipeline_outputs=True,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        perform_initialization=False,  # the weights are read from a folder
        **options,
    )


def _routing(experts: ExpertShape, layers: int, parallel: int) -> dict[str, Any]:
    """Return the options that route as transformers does: logits in the model's dtype, softmax in float32; corrected scores
    all in float32. No token is dropped. megatron-core balances nothing: `StageExperts` does."""
    found: dict[str, Any] = {
        "num_moe_experts": experts.count,
        "moe_ffn_hidden_size": experts.intermediate_size,
        "moe_layer_freq": [int(layer in experts.layers) for layer in range(layers)],
        "moe_router_topk": experts.per_token,
        # Softmax over only the chosen experts equals softmax over all experts, normalised.
        "moe_router_pre_softmax": not experts.normalized,
        "moe_router_load_balancing_type": "none",
        "expert_model_parallel_size": parallel,
    }
    if experts.corrected:
        found |= {
            "moe_router_score_function": "sigmoid",
            "moe_router_dtype": "fp32",
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 0.0,
            "moe_router_topk_scaling_factor": experts.scale,
        }
    if experts.groups > 1:
        found |= {"moe_router_num_groups": experts.groups, "moe_router_group_topk": experts.groups_per_token}
    if experts.shared_size:
        found["moe_shared_expert_intermediate_size"] = experts.shared_size
    return found
