"""How a loaded model computes a micro-batch: packed, or every sequence whole in a right-padded row of its own.

Packed, it runs on one row of T tokens: every prompt once, then the replies. Only attention sees sequences: tokens are gathered
into rows (a shared prompt into each of its replies' rows), attended causally and put back. So linear layers, norms and the head
waste nothing on padding or on repeated prompts, and gradients are exact: the gathers' backward sums over the copies.

Rows of their own are for models that mix tokens otherwise than by attention, as by a recurrent state, which would go on from
one packed sequence into the next. All rows are right-padded: tokens see those before them alone, so no padding reaches one, and
no mask is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from runtime.errors import UserError

PACKED_ATTENTION = "sluice_packed"  # the name of `packed_attention` at transformers
_UNGROUPED = {"npu"}  # devices whose attention kernel wants as many key heads as query heads


@dataclass(frozen=True)
class Packing:
    """How T packed tokens make up attention rows. The rows are split into buckets of similar length."""

    rows: list[torch.Tensor]  # int64 [rows of the bucket, its longest]: packed index of each cell; 0 in padding
    cells: torch.Tensor  # int64 [T]: cell of the concatenated buckets from which a packed token takes its output
    queries: list[torch.Tensor] | None = None
    """Where a part of the tokens attends to all, int64 [rows of the bucket, at most its longest]: which of the part are at the
    ends of the rows. `rows` are then of all tokens' indices, `cells` of the part."""


def exact_on_cpu(hidden: torch.Tensor, head: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the two factors of the logits as float32 on a CPU, as they are on an accelerator.

    Products of bfloat16 are added up in float32. Logits that are rounded afterwards make half of the gap between rollouts and
    trainer. Known limit: accelerators round them, as torch gives no gradient of a product whose result has another dtype.
    """
    return (hidden.float(), head.float()) if hidden.device.type == "cpu" else (hidden, head)


def packs(model: Any) -> bool:
    """Whether a loaded model runs packed."""
    return bool(model.config._attn_implementation == PACKED_ATTENTION)


def fed(
    model: Any, input_ids: torch.Tensor, position_ids: torch.Tensor, packing: Packing
) -> tuple[dict[str, Any], torch.Tensor | None]:
    """What a loaded model is called with for T packed tokens; and which of the cells that it then computes these are, int64
    [T], None where they are the same. Where the model does not run packed, `packing` has one bucket: a pass is one call, as all
    ranks of FSDP2 make equally many."""
    if packs(model):
        return {"input_ids": input_ids, "position_ids": position_ids, "packing": packing, "use_cache": False}, None
    (rows,) = packing.rows
    return {"input_ids": input_ids[0][rows], "use_cache": False}, packing.cells


def predict(
    model: Any, input_ids: torch.Tensor, position_ids: torch.Tensor, packing: Packing, predictors: torch.Tensor
) -> torch.Tensor:
    """What the head of a language model gives at the packed indices `predictors` (int64 [N]) alone: logits [N, vocabulary];
    after `take_head` what it takes."""
    arguments, cells = fed(model, input_ids, position_ids, packing)
    if cells is None:
        return model(**arguments, logits_to_keep=predictors).logits[0]  # type: ignore[no-any-return]
    chosen = cells[predictors]

    def alone(head: nn.Module, taken: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        return (F.embedding(chosen, taken[0].flatten(0, 1))[None],)

    hook = model.get_output_embeddings().register_forward_pre_hook(alone)
    try:
        return model(**arguments).logits[0]  # type: ignore[no-any-return]
    finally:
        hook.remove()


# ----------------------------------------------------------------------------------------------------------------------
# Attention for packed sequences, several of which may begin with the same tokens.


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
    s_aux: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """A Hugging Face attention function. query [1, heads, T, d], key and value [1, kv_heads, T, d] -> [1, T, heads, d]. With
    `packing.queries`, key and value have more tokens. `s_aux` [heads]: the model's attention sinks.

    Raises UserError for models whose attention is more than a scaled softmax.
    """
    if options.get("softcap") is not None:
        raise UserError("model.path: this model's attention uses 'softcap', which the torch trainer does not support")
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
        if s_aux is None:
            causality = _causality(asked, length, sliding_window, query.device)
        else:
            scaling, mask = scaling or head_dim**-0.5, _mask(asked, length, sliding_window, query.device)
            q, k, v, mask = with_sinks(q, k, v, s_aux, scaling, mask)
            causality = {"attn_mask": mask}
        output = F.scaled_dot_product_attention(q, k, v, scale=scaling, enable_gqa=grouped, **causality)[..., :value_dim]
        outputs.append(output.transpose(1, 2).reshape(count * asked, heads * value_dim))
    return F.embedding(packing.cells, torch.cat(outputs)).view(1, tokens, heads, value_dim), None


def _causality(asked: int, length: int, sliding_window: int | None, device: torch.device) -> dict[str, Any]:
    """For the last `asked` tokens of a row as queries."""
    if asked == length and (sliding_window is None or sliding_window >= length):
        return {"is_causal": True}
    return {"attn_mask": _mask(asked, length, sliding_window, device)}


def _mask(asked: int, length: int, sliding_window: int | None, device: torch.device) -> torch.Tensor:
    distance = torch.arange(length - asked, length, device=device)[:, None] - torch.arange(length, device=device)
    return (distance >= 0) & (distance < (sliding_window or length))


def with_sinks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor, scale: float, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention sinks (Xiao et al. 2023, arXiv:2309.17453), as gpt-oss has them: a learned number a head, which is one more
    score in each softmax and has no value.

    What plain attention by `scale` and `mask` (bool, true where a query sees a key) is to be given, so that it has `sinks`
    [heads]: query, key, value and mask. Of the result the last element of a head is left out.

    query [b, heads, t, d], key and value [b, kv_heads, s, d]. In front there is one more key, and an element more of each: of
    this key it is 1, of the others 0, and of a query its head's sink.
    """
    own = (sinks / scale).to(query.dtype).view(1, -1, 1, 1).expand(*query.shape[:3], 1)
    key, value = (F.pad(each, (0, 1, 1, 0)) for each in (key, value))
    key[:, :, 0, -1] = 1.0
    return torch.cat((query, own), -1), key, value, F.pad(mask, (1, 0), value=True)
