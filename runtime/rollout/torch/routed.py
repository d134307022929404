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
    """Of each running sequence, by the position of the token; L layers with experts, k experts a token. A token that is fed
    again has those of the last time, but for `RolloutEngine.swap` with `recompute`: what was sampled behind it took the first.

    Nothing is recorded before the first request that asks for it.
    """

    def __init__(self, decoder: Decoder, sequences: int, length: int):
        self._decoder, self._experts = decoder, decoder.config.experts
        self._shape = sequences, length
        self.of: np.ndarray | None = None  # [sequences, length, L, k]

    def look(self, requests: Sequence[GroupRequest]) -> None:
        if self.of is None and self._experts is not None and any(each.sampling.experts_from >= 0 for each in requests):
            kind = np.uint8 if self._experts.count <= 256 else np.uint16
            self.of = np.zeros((*self._shape, len(self._experts.layers), self._experts.per_token), kind)

    def begin(self) -> None:
        """What the decoder computes until `taken` is recorded."""
        self._decoder.chosen = [] if self.of is not None else None

    def taken(self, texts: int = 1) -> np.ndarray | None:
        """[texts, tokens of each, L, k], padding included: of as many texts as were computed side by side."""
        chosen, self._decoder.chosen = self._decoder.chosen, None
        if self.of is None or chosen is None:
            return None
        layers = self.of.shape[2]
        parts = [torch.stack(chosen[at : at + layers], 1).unflatten(0, (texts, -1)) for at in range(0, len(chosen), layers)]
        return torch.cat(parts, 1).cpu().numpy().astype(self.of.dtype)

    def note(self, sequences: np.ndarray, positions: np.ndarray) -> None:
        """Record a step: of each token its sequence and position, int64 [m]. Drafts that are not right are fed over again."""
        if (taken := self.taken()) is not None and self.of is not None:
            self.of[sequences, positions] = taken[0]

    def of_texts(self, texts: Sequence[np.ndarray], begun: Sequence[int]) -> list[np.ndarray | None]:
        """Of each text that was computed beside the others [its length, L, k]; 0 of its first tokens, `begun`."""
        found: list[np.ndarray | None] = [None] * len(texts)
        if (taken := self.taken(len(texts))) is not None:
            for row, (text, first) in enumerate(zip(texts, begun, strict=True)):
                found[row] = own = np.zeros((len(text), *taken.shape[2:]), taken.dtype)
                own[first:] = taken[row, : len(text) - first]
        return found

    def note_prompt(self, sequence: int, taken: np.ndarray | None) -> None:
        """`taken` [P, L, k]: of a sequence's prompt."""
        if self.of is not None and taken is not None:
            self.of[sequence, : len(taken)] = taken


def with_experts(sample: Sample, request: GroupRequest, taken: np.ndarray | None) -> Sample:
    """`taken` [at least P + R - 1, L, k], from the prompt's first token on."""
    if taken is None or request.sampling.experts_from < 0:
        return sample
    own = taken[request.sampling.experts_from : len(request.prompt) + len(sample.tokens) - 1]
    return replace(sample, experts=RoutedExperts.of(own.copy()))
