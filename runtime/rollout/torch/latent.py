"""Multi-head latent attention of the lean decoder (DeepSeek-V2, arXiv:2405.04434, section 2.1 and appendix C).

Of a token the cache has one vector for all heads: the normed latent, of which keys and values are made, and the rotated part
of the keys. Whole texts are attended with keys and values. A decode step is attended without making them: the up-projection
of the keys is taken into the query, and that of the values comes after attention, which then has one key-value head, whose
values are a part of its keys.

m tokens; a head of queries and keys has `head` = `plain` + `rotated` elements; an entry of the cache `cached` = `rank` +
`rotated`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from runtime.models.families.shape import LATENT_EPS, LatentShape
from runtime.rollout.torch.decoder_weights import LayerWeights


class LatentAttention:
    """What of the attention depends on weights, but for the output projection."""

    def __init__(self, heads: int, latent: LatentShape):
        self._heads, self._shape = heads, latent

    def project(self, layer: LayerWeights, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Of the normed input [m, hidden] the queries and what is cached, [m, heads · head + cached]. cos, sin
        [m, 1, rotated]."""
        shape, assembled = self._shape, F.linear(x, layer.qkv)
        query, latent, rotated = assembled.split((assembled.shape[1] - shape.cached, shape.rank, shape.rotated), 1)
        if layer.query_up is not None:
            query = F.linear(F.rms_norm(query, query.shape[1:], layer.query_norm, LATENT_EPS), layer.query_up)
        plain, turned = query.view(len(x), self._heads, -1).split((shape.plain, shape.rotated), 2)
        query = torch.cat((plain, _rotated(turned, cos, sin)), 2).flatten(1)
        latent = F.rms_norm(latent, (shape.rank,), layer.latent_norm, LATENT_EPS)
        return torch.cat((query, latent, _rotated(rotated.unsqueeze(1), cos, sin).squeeze(1)), 1)

    def split(self, projected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What `project` gave: queries [..., heads, head] and entries of the cache [..., cached]."""
        query, entry = projected.split((projected.shape[-1] - self._shape.cached, self._shape.cached), -1)
        return query.unflatten(-1, (self._heads, -1)), entry

    def expand(self, layer: LayerWeights, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [b, heads, t, head] and values [b, heads, t, value] of entries [b, t, cached]."""
        shape = self._shape
        latent, rotated = entries.split((shape.rank, shape.rotated), 2)
        assert layer.latent_up is not None
        plain, value = (
            F.linear(latent, layer.latent_up)
            .view(*latent.shape[:2], self._heads, -1)
            .transpose(1, 2)
            .split((shape.plain, shape.value), 3)
        )
        return torch.cat((plain, rotated.unsqueeze(1).expand(-1, self._heads, -1, -1)), 3), value

    def absorb(self, layer: LayerWeights, query: torch.Tensor) -> torch.Tensor:
        """Queries [m, heads, head] for keys that are the cache's entries: [m, 1, heads, cached]."""
        plain, rotated = query.split((self._shape.plain, self._shape.rotated), 2)
        keys, _ = self._up(layer)
        latent = torch.bmm(plain.transpose(0, 1), keys).transpose(0, 1)
        return torch.cat((latent, rotated), 2).unsqueeze(1)

    def means(self, entries: torch.Tensor) -> torch.Tensor:
        """Of the cache's entries [..., cached] what attention takes as values, as a view: the latents, [..., rank]."""
        return entries[..., : self._shape.rank]

    def values(self, layer: LayerWeights, mean: torch.Tensor) -> torch.Tensor:
        """From means of latents [m, heads · rank] what the output projection takes, [m, heads · value]."""
        _, values = self._up(layer)
        latent = mean.view(len(mean), self._heads, -1).transpose(0, 1)
        return torch.bmm(latent, values.transpose(1, 2)).transpose(0, 1).flatten(1)

    def _up(self, layer: LayerWeights) -> tuple[torch.Tensor, torch.Tensor]:
        """The up-projections of keys, [heads, plain, rank], and of values, [heads, value, rank]."""
        assert layer.latent_up is not None
        keys, values = layer.latent_up.view(self._heads, -1, self._shape.rank).split((self._shape.plain, self._shape.value), 1)
        return keys, values


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """[m, n, rotated], whose pairs are neighbours, not halves: those of the result are halves, of queries as of keys."""
    halves = x.unflatten(2, (-1, 2)).transpose(2, 3).flatten(2)
    return (halves * cos + halves.roll(halves.shape[2] // 2, -1) * sin).to(x.dtype)
