"""Attention sinks (Xiao et al. 2023, arXiv:2309.17453), as gpt-oss has them: a learned number a head, which is one more score
in each softmax and has no value.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def with_sinks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor, scale: float, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What plain attention by `scale` and `mask` (bool, true where a query sees a key) is to be given, so that it has `sinks`
    [heads]: query, key, value and mask. Of the result the last element of a head is left out.

    query [b, heads, t, d], key and value [b, kv_heads, s, d]. In front there is one more key, and an element more of each: of
    this key it is 1, of the others 0, and of a query its head's sink.
    """
    own = (sinks / scale).to(query.dtype).view(1, -1, 1, 1).expand(*query.shape[:3], 1)
    key, value = (F.pad(each, (0, 1, 1, 0)) for each in (key, value))
    key[:, :, 0, -1] = 1.0
    return torch.cat((query, own), -1), key, value, F.pad(mask, (1, 0), value=True)
