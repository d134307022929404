"""Every reply of an evaluation, as JSON lines: `RUN/evaluations/step-00000050/SET.jsonl`."""

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
# The problems of evaluations, on which no step trains. They are read here alone.


class HeldOut(Struct, frozen=True):
    """A data set and the problems of it that are asked."""

    settings: EvaluationData
    prompts: Prompts


def load_held_out(config: Config, tokenizer: Tokenizer, train: Sequence[Problem] = ()) -> list[HeldOut]:
    """Return the problems of every set.

    Raises UserError for an unusable file, a file without a usable prompt, and, unless `data.allow_overlap`, a file that shares
    problems with those to `train` on, asked or not.
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
    """The methods needed of a tokenizer."""

    def decode(self, ids: np.ndarray, skip_special: bool = True) -> str: ...

    def decode_batch(self, batch: Sequence[np.ndarray], skip_special: bool = True) -> list[str]: ...


class Generation(Struct, kw_only=True):
    """One reply, one line; the last branch of an episode. Prompt and reply are text with special tokens, as the model saw and
    made them."""

    set: str
    problem: str
    sample: int
    prompt: str
    reply: str
    label: str
    answer: str | None  # None: the first rule found no answer, or names none
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
    """Return the replies to one problem of the set `name`, which were asked for in `parts`. `correct` of the rule `judge` is
    the least value of a correct reply. `outcomes`: one for each episode."""
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
    """Return each rule's value of one sample; None if the rule failed."""
    return {name: None if np.isnan(values[index]) else float(values[index]) for name, values in scores.rules.items()}


def versions_of(sample: Sample) -> tuple[str, str]:
    """Return the versions of the oldest and the newest token; "" without tokens."""
    if not len(sample.versions):
        return "", ""
    oldest, newest = (str(PolicyVersion.unpack(int(pick(sample.versions)))) for pick in (np.min, np.max))
    return oldest, newest


def mean_logprob(sample: Sample) -> float | None:
    """Return the mean over the tokens that the model sampled; None without such tokens."""
    sampled = sample.logprobs[sample.loss_mask.astype(bool)]
    return float(sampled.mean()) if len(sampled) else None


class Transcript:
    """The file of one set. Problems arrive in any order; lines are written in the order of the problems."""

    def __init__(self, path: Path):
        self._waiting: dict[int, bytes] = {}
        self._next = 0
        self._file = disk.until_done(lambda: path.open("wb", buffering=0), path)

    def add(self, place: int, replies: Sequence[Generation]) -> None:
        """Write the replies to problem `place`, or keep them until the replies to earlier problems are there."""
        self._waiting[place] = b"".join(msgspec.json.encode(each) + b"\n" for each in replies)
        while (lines := self._waiting.pop(self._next, None)) is not None:
            disk.write(self._file, lines)
            self._next += 1

    def close(self) -> None:
        """Write the replies that are left, even if earlier problems are missing."""
        with self._file:
            for place in sorted(self._waiting):
                disk.write(self._file, self._waiting.pop(place))


def read(path: Path) -> Iterator[Generation]:
    """Yield the replies in a file, without a last line that is still being written. Raises UserError."""
    decode = msgspec.json.Decoder(Generation).decode
    try:
        with run_files.regular(path, None).open("rb") as file:
            while (line := file.readline(LONGEST)).endswith(b"\n"):
                yield decode(line)
    except OSError as error:
        raise UserError(f"{path}: {(error.strerror or str(error)).lower()}") from error
    except run_files.NOT_DECODED as error:
        raise UserError(f"{path}: not the replies of an evaluation: {error}") from error
