"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) on megatron-core, for packed sequences.

The parameters are those of megatron-core's `MLASelfAttention`. Its forward pass knows positions that count from 0 alone, and no
attention bias; and where tensor parallelism cuts the down-projections, the shared part of the keys has on each rank the
gradient of this rank's heads alone.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.multi_latent_attention import MLASelfAttention


class LatentSelfAttention(MLASelfAttention):
    """`rotary_pos_emb` are cosines and sines [2, T, 1, 1, rotated], already multiplied by what they grow by."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: None,
        *,
        rotary_pos_emb: torch.Tensor,
        attention_bias: Any,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """[T, 1, H], with sequence parallelism a part of it -> the same, and no bias."""
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
        # All ranks' heads use it, and its gradient is the sum of theirs.
        shared = tensor_parallel.copy_to_tensor_model_parallel_region(shared)
        turned = _rotated(shared.unsqueeze(2), *rotary_pos_emb)
        made, _bias = self.linear_kv_up_proj(self.kv_layernorm(self._part_of_sequence(latent)))
        plain, value = self._heads(made).split((config.qk_head_dim, config.v_head_dim), -1)
        key = torch.cat((plain, turned.expand(-1, -1, plain.shape[2], -1)), -1)

        output, _bias = self.linear_proj(self.core_attention(query, key, value, None, attention_bias=attention_bias))
        return output, None

    def _whole(self, down: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """What a down-projection, whose rows are spread over the ranks, makes of all tokens: [T, 1, width]."""
        part, _bias = down(hidden)
        whole: torch.Tensor = tensor_parallel.gather_from_tensor_model_parallel_region(part)
        return whole

    def _part_of_sequence(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's tokens, with sequence parallelism."""
        if not self.config.sequence_parallel:
            return whole
        part: torch.Tensor = tensor_parallel.scatter_to_sequence_parallel_region(whole)
        return part

    def _heads(self, projected: torch.Tensor) -> torch.Tensor:
        """[T, 1, heads of this rank, d]."""
        return projected.unflatten(-1, (self.num_attention_heads_per_partition, -1))


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """[T, 1, n, rotated], whose pairs are neighbours, not halves: those of the result are halves, of queries as of keys."""
    first, second = x[..., 0::2], x[..., 1::2]
    rotated = torch.cat((first, second), -1) * cos + torch.cat((-second, first), -1) * sin
    return rotated.to(x.dtype)
