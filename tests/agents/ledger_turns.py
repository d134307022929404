"""What a step was trained on, as the run's ledger has it: JSON on standard output.

`python -m tests.agents.ledger_turns RUN STEP`, from the repository and its environment. Steps count from 1. A turn is a run of
tokens that are trained: how many tokens its branch has before it, and the log-probabilities with which it was sampled.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from runtime import types
from runtime.ledger.reader import LedgerReader
from runtime.types import GroupPayload, Sample


def episodes(run: Path, step: int) -> Iterator[dict[str, Any]]:
    with LedgerReader(run / "ledger") as ledger:
        for group in ledger.groups(steps=(step - 1, step - 1)):
            payload = types.decode(GroupPayload, ledger.read(group.handles["payload"]))
            assert group.scores is not None
            ends = np.cumsum(payload.rows, dtype=np.int64)
            for end, rows, reward in zip(ends, payload.rows, group.scores.rewards.tolist(), strict=True):
                turns = [turn for row in payload.samples[end - rows : end] for turn in _turns(len(payload.prompt), row)]
                yield {"reward": reward, "branches": int(rows), "turns": turns}


def _turns(prompt: int, row: Sample) -> Iterator[dict[str, Any]]:
    edges = np.diff(np.concatenate([[0], row.loss_mask, [0]]))
    for begin, end in zip(np.flatnonzero(edges == 1), np.flatnonzero(edges == -1), strict=True):
        yield {"prompt": prompt + int(begin), "logprobs": row.logprobs[begin:end].tolist()}


if __name__ == "__main__":
    print(json.dumps(list(episodes(Path(sys.argv[1]), int(sys.argv[2])))))
