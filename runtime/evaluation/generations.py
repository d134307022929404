"""Every reply of an evaluation, kept as JSON lines: `RUN/evaluations/step-00000050/SET.jsonl`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from runtime import config, run_files
from runtime.config import Config, Data
from runtime.data.handlers import Problem
from runtime.data.prepare import keep_apart
from runtime.data.prepared import read_prompts
from runtime.data.prompts import Prompts
from runtime.data.tokenizer import Tokenizer
from runtime.errors import UserError
from runtime.evaluation.results import EvaluationData, evaluation_sets
from runtime.process import disk
from runtime.types import FinishReason, GroupPayload, PolicyVersion, Sample, Scores

# ---- Held out
#
# The problems that evaluations ask, and no step trains on: the one place where they are read.


class HeldOut(Struct, frozen=True):
    """A data set and its problems, no more than are asked."""

    settings: EvaluationData
    prompts: Prompts


def load_held_out(config: Config, tokenizer: Tokenizer, train: Sequence[Problem] = ()) -> list[HeldOut]:
    """Return the problems of every set.

    Raises UserError for a file that cannot be used, of which no prompt is left, or which has problems in common with those to
    `train` on, asked or not (unless `data.allow_overlap`).
    """
    return [HeldOut(found, _prompts(found, config.data, tokenizer, train)) for found in evaluation_sets(config)]


def _prompts(found: EvaluationData, data: Data, tokenizer: Tokenizer, train: Sequence[Problem]) -> Prompts:
    prompts = read_prompts(found.path, found.row_format, tokenizer, data.max_prompt_tokens, found.key)
    keep_apart(train, prompts.problems, found.key, data.allow_overlap)
    count = found.problems or len(prompts.problems)
    return replace(prompts, problems=prompts.problems[:count], tokens=prompts.tokens[:count])


LONGEST = 1 << 26  # bytes of a line
SUFFIX = ".jsonl"


class TextDecoder(Protocol):
    """What is needed of a tokenizer."""

    def decode(self, ids: np.ndarray, skip_special: bool = True) -> str: ...

    def decode_batch(self, batch: Sequence[np.ndarray], skip_special: bool = True) -> list[str]: ...


class Generation(Struct, kw_only=True):
    """One reply, one line; of an episode its last branch. Prompt and reply are text with special tokens, as the model saw and
    made them."""

    set: str
    problem: str
    sample: int
    prompt: str
    reply: str
    label: str
    answer: str | None  # None: the first rule found none, or names none
    correct: bool | None  # by the first rule; None: a rule failed
    reward: float | None
    rules: dict[str, float | None]
    tokens: int
    finish: FinishReason
    versions: tuple[str, str]  # of its oldest and newest token
    logprob: float | None  # mean over the model's tokens; None: there are none
    outcome: str = ""  # of an episode: its stop reason, or why it is left out
    earlier: list[str] = []  # of an episode: its branches before the last, as replies


def replies_to(
    name: str,
    problem: Problem,
    parts: Sequence[tuple[GroupPayload, Scores]],
    judge: config.Rule,
    text: TextDecoder,
    outcomes: Sequence[str] = (),
) -> list[Generation]:
    """Return the replies to one problem of the set `name`, which were asked for in `parts`. `judge`: whose `correct` decides.
    `outcomes`: of episodes, one for each."""
    rule = judge.name.rpartition(":")[2]  # one of the user's own is FILE.py:NAME
    prompt = text.decode(parts[0][0].prompt, skip_special=False)
    found: list[Generation] = []
    for payload, scores in parts:
        rows = payload.samples
        replies = text.decode_batch([row.tokens for row in rows], skip_special=False)
        lasts = np.cumsum(payload.rows, dtype=np.int64) - 1
        for index, (last, count) in enumerate(zip(lasts.tolist(), payload.rows, strict=True)):
            sample = rows[last]
            valid = bool(scores.valid[index])
            found.append(
                Generation(
                    set=name,
                    problem=problem.id,
                    sample=len(found),
                    prompt=prompt,
                    reply=replies[last],
                    label=problem.label,
                    answer=scores.answers[index] if scores.answers else None,
                    correct=bool(scores.rules[rule][index] >= judge.correct) if valid else None,
                    reward=float(scores.rewards[index]) if valid else None,
                    rules=values_at(scores, index),
                    tokens=len(sample.tokens),
                    finish=sample.finish_reason,
                    versions=versions_of(sample),
                    logprob=mean_logprob(sample),
                    outcome=outcomes[len(found)] if outcomes else "",
                    earlier=replies[last + 1 - count : last],
                )
            )
    return found


def values_at(scores: Scores, index: int) -> dict[str, float | None]:
    """Each rule's value of one sample; None where the rule failed."""
    return {name: None if np.isnan(values[index]) else float(values[index]) for name, values in scores.rules.items()}


def versions_of(sample: Sample) -> tuple[str, str]:
    """Those of its oldest and newest token; "" where it has none."""
    if not len(sample.versions):
        return "", ""
    oldest, newest = (str(PolicyVersion.unpack(int(pick(sample.versions)))) for pick in (np.min, np.max))
    return oldest, newest


def mean_logprob(sample: Sample) -> float | None:
    """Over the tokens that the model sampled; None where there are none."""
    sampled = sample.logprobs[sample.loss_mask.astype(bool)]
    return float(sampled.mean()) if len(sampled) else None


class Transcript:
    """One set's file. Problems come in any order; their lines stand in the order of the problems."""

    def __init__(self, path: Path):
        self._waiting: dict[int, bytes] = {}
        self._next = 0
        self._file = disk.until_done(lambda: path.open("wb", buffering=0), path)

    def add(self, place: int, replies: Sequence[Generation]) -> None:
        """Write the replies to problem `place`, or keep them until those to the problems before are there."""
        self._waiting[place] = b"".join(msgspec.json.encode(each) + b"\n" for each in replies)
        while (lines := self._waiting.pop(self._next, None)) is not None:
            disk.write(self._file, lines)
            self._next += 1

    def close(self) -> None:
        """Write what is there, also where problems before it are missing."""
        with self._file:
            for place in sorted(self._waiting):
                disk.write(self._file, self._waiting.pop(place))


def read(path: Path) -> Iterator[Generation]:
    """Return the replies in a file; a last line that is still being written is left out. Raises UserError."""
    decode = msgspec.json.Decoder(Generation).decode
    try:
        with run_files.regular(path, None).open("rb") as file:
            while (line := file.readline(LONGEST)).endswith(b"\n"):
                yield decode(line)
    except OSError as error:
        raise UserError(f"{path}: {(error.strerror or str(error)).lower()}") from error
    except run_files.NOT_DECODED as error:
        raise UserError(f"{path}: not the replies of an evaluation: {error}") from error
