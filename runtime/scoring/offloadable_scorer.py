"""A reference whose devices are others' as well: the model is on them while it is asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from runtime.commands import Offload, Onload
from runtime.types import LogprobRequest, Logprobs


class LogprobScorer(Protocol):
    def logprobs(self, requests: Sequence[LogprobRequest]) -> list[Logprobs]: ...

    def offload(self) -> None: ...

    def onload(self) -> None: ...


class OffloadableScorer:
    """`scorer`, which comes back to its device with the first question, if nobody called it back before."""

    def __init__(self, scorer: LogprobScorer, away: bool):
        """`away`: it gives up its device now."""
        self._scorer = scorer
        self._away = False
        if away:
            self.handle(Offload())

    def handle(self, command: Onload | Offload) -> None:
        """Nothing is done where it was done already."""
        if self._away != isinstance(command, Offload):
            self._away = not self._away
            if self._away:
                self._scorer.offload()
            else:
                self._scorer.onload()

    def logprobs(self, requests: Sequence[LogprobRequest]) -> list[Logprobs]:
        self.handle(Onload())
        return self._scorer.logprobs(requests)
