"""How a loaded model computes a micro-batch: packed, or every sequence whole in a right-padded row of its own.

Rows are for models that mix tokens otherwise than by attention, as by a recurrent state, which would go on from one packed
sequence into the next. Tokens see those before them alone, so no padding reaches one, and no mask is needed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from runtime.models.hf_policy import PACKED, Packing


def packs(model: Any) -> bool:
    """Whether a loaded model runs packed."""
    return bool(model.config._attn_implementation == PACKED)


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
