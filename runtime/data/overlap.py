"""Problems that two sets have in common. Texts are compared without their whitespace, which copies of a data set differ in."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import xxhash

from runtime.data.handlers import Problem
from runtime.errors import UserError

log = logging.getLogger("sluice")

_SHOWN_CHARACTERS = 60


def problem_key(question: str) -> int:
    """Equal where two problems are the same but for whitespace (up to 128-bit collisions)."""
    return xxhash.xxh3_128_intdigest("".join(question.split()).encode("utf-8", "surrogatepass"))


def overlap(train: Iterable[Problem], held_out: Iterable[Problem]) -> list[Problem]:
    """The problems of `held_out` that are in `train` too, in their order."""
    known = {problem_key(problem.question) for problem in train}
    return [problem for problem in held_out if problem_key(problem.question) in known]


def keep_apart(train: Sequence[Problem], held_out: Sequence[Problem], key: str, allowed: bool) -> None:
    """Refuse to train on problems of the evaluation set that the configuration key `key` names.

    Raises UserError with their number, unless `allowed`: then the log has it.
    """
    shared = overlap(train, held_out)
    if not shared:
        return
    first = " ".join(shared[0].question.split())
    shown = first if len(first) <= _SHOWN_CHARACTERS else f"{first[:_SHOWN_CHARACTERS]}…"
    found = f"{len(shared)} of the {len(held_out)} problems of {key} are in it too, first {shared[0].id} ({shown!r})"
    if not allowed:
        raise UserError(f"data.train: {found}; leave one of the files out, or set data.allow_overlap")
    log.warning("data.train: %s", found)
