"""A ledger that has lost what it knew, as the checkpoint tells with which a run goes on. The coordinator then goes on from the
checkpoint alone (`Attempt._restore`)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path

from runtime import run_files
from runtime.ledger import checkpoint
from runtime.ledger.reader import DATABASE, LedgerDamaged, LedgerReader, groups_within

ASIDE = "ledger.broken-"


def examine(run_dir: Path, resume: Path, say: Callable[[str], None]) -> None:
    """Before the run goes on from its own checkpoint `resume`. A ledger that cannot be read is set aside, and `say` is told of
    it and of what is missing. Raises UserError for a ledger of another format."""
    folder, position = run_dir / run_files.LEDGER, checkpoint.read_position(resume)
    known, missing = groups_within(position.trained), 0
    try:
        if (folder / DATABASE).exists():
            with LedgerReader(folder) as ledger:
                ledger.check_whole()
                missing = ledger.missing(position.trained)
        else:
            missing = known
    except LedgerDamaged as error:
        aside = next(path for n in count(1) if not (path := run_dir / f"{ASIDE}{n}").exists())
        folder.replace(aside)
        say(f"{error}; it is set aside as {aside.name}, and another begun")
        missing = known
    if missing:
        told = f"{missing} of the {known} groups that {resume.name} has trained are missing"
        say(f"{folder}: {told}: they are not trained again, and nothing is known of them but their number")
