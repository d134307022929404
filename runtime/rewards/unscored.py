"""The end of a run whose replies get no score: it would train on nothing, and end as if it had learned."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from runtime.errors import ServiceFault
from runtime.types import Scores

UNSCORED_STEPS = 3  # in a row


class UnscoredSteps:
    """The count of steps in a row of which no reply has a score."""

    def __init__(self) -> None:
        self._any_scored = False
        self._in_a_row = 0

    def step(self, scores: Sequence[Scores], last: bool) -> None:
        """Raises ServiceFault at the third in a row, and at the `last` step where none before it had a score either."""
        if not scores or any(group.valid.any() for group in scores):
            self._any_scored, self._in_a_row = True, 0
            return
        self._in_a_row += 1
        if self._in_a_row >= UNSCORED_STEPS or (last and not self._any_scored):
            raise unscored(scores, f"{self._in_a_row} steps in a row")


def unscored(scores: Sequence[Scores], of: str) -> ServiceFault:
    """What is raised where no reply has a score: names the rules that gave none, and the last cause."""
    rules = sorted({name for group in scores for name, values in group.rules.items() if np.isnan(values).any()})
    causes = [reason for group in scores for reason in group.errors]
    cause = f"; the last cause is {causes[-1]}" if causes else ""
    return ServiceFault("reward", ", ".join(rules) or "score", f"no reply of {of} has a score{cause} (logs/reward-*.log)")
