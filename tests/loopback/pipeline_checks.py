"""What holds of every run: the order of the trainer's commands, and the ledger's books."""

from __future__ import annotations

import itertools
from collections import Counter

from runtime.ledger.reader import LedgerReader
from runtime.ledger.states import Phase
from tests.loopback.pipeline_fakes import FakeTrainer, RunFolder


def check_order(trainer: FakeTrainer, first: int, last: int) -> None:
    """Each step: begin, accumulate at least once, apply, then its weights, before anything of the next step; then saves."""
    commands = [command for command in trainer.posted if command[0] not in ("save", "export")]
    assert commands.pop(0) == ("send_weights", first)
    for step in range(first, last):
        assert commands.pop(0) == ("begin", step)
        sent = list(itertools.takewhile(lambda command, now=("accumulate", step): command == now, commands))
        assert sent, f"nothing was accumulated for step {step}"
        del commands[: len(sent)]
        assert commands.pop(0) == ("apply", step)
        assert commands.pop(0) == ("send_weights", step + 1)
    assert commands == []


def check_books(folder: RunFolder, steps: int) -> None:
    """The ledger holds every group in one final state, and each step trained on B of them."""
    with LedgerReader(folder.path / "ledger") as reader:
        counts = reader.check_final(folder.groups_per_step)
    assert counts["retired"] == steps * folder.groups_per_step
    by_step = Counter(group.step for group in folder.groups(Phase.RETIRED))
    assert by_step == dict.fromkeys(range(steps), folder.groups_per_step)
