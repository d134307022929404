"""Attention for sequences packed without padding, several of which may begin with the same tokens.

A Hugging Face model runs on one row of T tokens: every prompt once, then the replies. Only attention sees sequences: tokens
are gathered into rows (a shared prompt into each of its replies' rows), attended causally and put back. So linear layers,
norms and the head waste nothing on padding or on repeated prompts, and gradients are exact: the gathers' backward sums over
the copies. Rows are right-padded; under the causal mask padding is never attended to by a real token, so no mask is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from runtime.errors import UserError

NAME = "sluice_packed"
_UNGROUPED = {"npu"}  # devices whose attention kernel wants as many key heads as query heads


@dataclass(frozen=True)
class Packing:
    """How T packed tokens make up attention rows. The rows are split into buckets of similar length."""

    rows: list[torch.Tensor]  # int64 [rows of the bucket, its longest]: packed index of each cell; 0 in padding
    cells: torch.Tensor  # int64 [T]: cell of the concatenated buckets from which a packed token takes its output
    queries: list[torch.Tensor] | None = None
    """Where a part of the tokens attends to all, int64 [rows of the bucket, at most its longest]: which of the part are at the
    ends of the rows. `rows` are then of all tokens' indices, `cells` of the part."""


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packing: Packing,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """A Hugging Face attention function. query [1, heads, T, d], key and value [1, kv_heads, T, d] -> [1, T, heads, d]. With
    `packing.queries`, key and value have more tokens.

    Raises UserError for models whose attention is more than a scaled softmax.
    """
    for name in ("softcap", "s_aux"):
        if options.get(name) is not None:
            raise UserError(f"model.path: this model's attention uses {name!r}, which the torch trainer does not support")
    heads, tokens, head_dim = query.shape[1:]
    kv_heads, value_dim = key.shape[1], value.shape[-1]
    queries = query[0].transpose(0, 1).reshape(tokens, heads * head_dim)
    keys = key[0].transpose(0, 1).reshape(-1, kv_heads * head_dim)
    values = value[0].transpose(0, 1).reshape(-1, kv_heads * value_dim)
    outputs = []
    for ends, rows in zip(packing.queries or packing.rows, packing.rows, strict=True):
        count, length = rows.shape
        asked = ends.shape[1]
        # Gathers are embedding look-ups because their backward is deterministic on accelerators.
        q = F.embedding(ends, queries).view(count, asked, heads, head_dim).transpose(1, 2)
        k = F.embedding(rows, keys).view(count, length, kv_heads, head_dim).transpose(1, 2)
        v = F.embedding(rows, values).view(count, length, kv_heads, value_dim).transpose(1, 2)
        grouped = heads != kv_heads
        if grouped and query.device.type in _UNGROUPED:
            k, v = (tensor.repeat_interleave(heads // kv_heads, dim=1) for tensor in (k, v))
            grouped = False
        causality = _causality(asked, length, sliding_window, query.device)
        output = F.scaled_dot_product_attention(q, k, v, scale=scaling, enable_gqa=grouped, **causality)
        outputs.append(output.transpose(1, 2).reshape(count * asked, heads * value_dim))
    return F.embedding(packing.cells, torch.cat(outputs)).view(1, tokens, heads, value_dim), None


def _causality(asked: int, length: int, sliding_window: int | None, device: torch.device) -> dict[str, Any]:
    """For the last `asked` tokens of a row as queries."""
    if sliding_window is None or sliding_window >= length:
        return {"is_causal": True} if asked == length else {"attn_mask": causal_lower_right(asked, length)}
    distance = torch.arange(length - asked, length, device=device)[:, None] - torch.arange(length, device=device)
    return {"attn_mask": (distance >= 0) & (distance < sliding_window)}
