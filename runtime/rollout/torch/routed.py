"""The experts that the embedded engine's tokens were given to, on the host: they travel with the samples that ask for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from msgspec.structs import replace

from runtime.columns import RoutedExperts
from runtime.rollout.torch.decoder import Decoder
from runtime.types import GroupRequest, Sample


class RoutingRecord:
    """By running sequence and position; L layers with experts, k experts a token. Nothing without `replays`.

    A token that is fed again, behind a draft that was wrong, has those of the last time. Where keys and values are made anew
    it keeps the first ones: what was sampled behind it saw these.
    """

    def __init__(self, decoder: Decoder, sequences: int, length: int, replays: bool):
        self._decoder, experts = decoder, decoder.config.experts
        self.of: np.ndarray | None = None  # uint8 or uint16 [sequences, length, L, k]
        if replays and experts is not None:
            layers, per_token, count = experts.routes
            self.of = np.zeros((sequences, length, layers, per_token), np.uint8 if count <= 256 else np.uint16)

    def begin(self) -> None:
        """What the decoder computes until `taken` is recorded."""
        self._decoder.chosen = None if self.of is None else []

    def taken(self, texts: int) -> np.ndarray:
        """[texts, tokens of each, L, k], padding included: of as many texts as were computed side by side."""
        assert self.of is not None and self._decoder.chosen is not None
        (chosen, self._decoder.chosen), layers = (self._decoder.chosen, None), self.of.shape[2]
        parts = [torch.stack(chosen[at : at + layers], 1) for at in range(0, len(chosen), layers)]
        return torch.cat([part.unflatten(0, (texts, -1)) for part in parts], 1).cpu().numpy().astype(self.of.dtype)

    def note(self, sequences: np.ndarray, positions: np.ndarray) -> None:
        """Record a step: of each token its sequence and position, int64 [m]."""
        if self.of is not None:
            self.of[sequences, positions] = self.taken(1)[0]

    def of_texts(self, texts: Sequence[np.ndarray], begun: Sequence[torch.Tensor]) -> list[np.ndarray | None]:
        """Of each of the texts, computed side by side behind what was `begun` of them: [its length, L, k], 0 of that."""
        if self.of is None:
            return [None] * len(texts)
        first = [each.shape[3] for each in begun] or [0] * len(texts)
        pairs = zip(self.taken(len(texts)), texts, first, strict=True)
        return [np.pad(row[: len(text) - known], ((known, 0), (0, 0), (0, 0))) for row, text, known in pairs]


def with_experts(sample: Sample, request: GroupRequest, taken: np.ndarray | None) -> Sample:
    """`taken` [at least P + R - 1, L, k], from the prompt's first token on."""
    if taken is None or request.sampling.experts_from < 0:
        return sample
    own = taken[request.sampling.experts_from : len(request.prompt) + len(sample.tokens) - 1]
    return replace(sample, experts=RoutedExperts.of(own.copy()))
