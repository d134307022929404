"""What an evaluation found: the figures of each data set, as JSON and as metrics.

`RUN/evaluations/step-00000050/` holds SET.jsonl, every reply (`runtime.evaluation.generations`), and `results.json`, which is
written last: without it an evaluation was cut short.
"""

from __future__ import annotations

import math
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct, field

from runtime import run_files
from runtime.algorithms.evaluation import clustered_standard_error, maj_at_k, pass_at_k
from runtime.errors import UserError
from runtime.evaluation.sets import EvaluationData
from runtime.telemetry.metrics import Metrics
from runtime.types import PolicyVersion

RESULTS = "results.json"
_FOLDER = re.compile(r"step-(\d{8})")


class EvaluatedProblem(Struct, kw_only=True):
    """One problem's replies, in the order of their samples."""

    correct: list[bool | None]  # None: a rule failed on it
    answers: list[str | None]  # [] when the first rule names none
    tokens: list[int]
    truncated: int
    errors: dict[str, int]
    oldest: PolicyVersion
    newest: PolicyVersion


class Lengths(Struct, kw_only=True):
    """Tokens of the replies; `truncated`: the share that ended by length. Percentiles are interpolated linearly."""

    mean: float
    median: float
    p95: float
    max: int
    truncated: float


class SetResult(Struct, kw_only=True):
    """The figures of one data set. A reply on which a rule failed has no verdict: it is in `errors`, and in no other figure
    but the lengths. pass@k and maj@k are means over the problems with at least k verdicts; `left_out` counts the others.
    """

    name: str
    path: str
    problems: int
    samples: int  # replies to each problem
    scored: int  # replies with a verdict
    pass_at: dict[int, float] = field(name="pass@k")
    maj_at: dict[int, float] = field(name="maj@k")
    standard_error: float | None  # of pass@1, clustered by problem
    left_out: dict[int, int] = {}  # by k
    lengths: Lengths
    errors: dict[str, int]
    notes: list[str] = []


class EvaluationResult(Struct, kw_only=True):
    """One evaluation after `step` optimizer steps. `accuracy`: the unweighted mean of the sets' pass@1. Versions, each as
    [incarnation, step], are those of the oldest and the newest token."""

    model: str
    step: int
    accuracy: float
    seconds: float
    oldest: PolicyVersion
    newest: PolicyVersion
    sets: list[SetResult]

    def write(self, folder: Path) -> None:
        """Write results.json, whole or not at all."""
        run_files.write_json(folder / RESULTS, self)


def folder_for(run_dir: Path, step: int) -> Path:
    return run_dir / run_files.EVALUATIONS / f"step-{step:08d}"


def folders(run_dir: Path) -> list[tuple[int, Path]]:
    """Step and folder of each of the run's evaluations, by step, those that were cut short included."""
    root = run_dir / run_files.EVALUATIONS
    found = ((_FOLDER.fullmatch(path.name), path) for path in root.iterdir()) if root.is_dir() else ()
    return sorted((int(match[1]), path) for match, path in found if match)


def forget_after(run_dir: Path, step: int) -> None:
    """Remove the evaluations of later steps, which a run that went back to `step` no longer has."""
    for later, folder in folders(run_dir):
        if later > step:
            shutil.rmtree(folder)


def read(run_dir: Path) -> list[EvaluationResult]:
    """The run's whole evaluations, by step. Raises UserError for one that cannot be read."""
    results = []
    for _, folder in folders(run_dir):
        path = folder / RESULTS
        if path.exists():
            try:
                results.append(msgspec.json.decode(run_files.regular(path).read_bytes(), type=EvaluationResult))
            except (OSError, *run_files.NOT_DECODED) as error:
                raise UserError(f"{path}: not the results of an evaluation: {error}") from error
    return results


def set_result(settings: EvaluationData, rule: str, evaluated: Sequence[EvaluatedProblem]) -> SetResult:
    """The figures of the problems `evaluated`. `rule`: the name of the rule whose verdicts they are."""
    verdicts = [[right for right in problem.correct if right is not None] for problem in evaluated]
    means = [sum(rights) / len(rights) for rights in verdicts if rights]
    result = SetResult(
        name=settings.name,
        path=settings.path,
        problems=len(evaluated),
        samples=settings.samples,
        scored=sum(map(len, verdicts)),
        pass_at={},
        maj_at={},
        standard_error=clustered_standard_error(means),
        lengths=_lengths(evaluated),
        errors=dict(sum((Counter(problem.errors) for problem in evaluated), Counter())),
    )
    for k in settings.k:
        enough = [rights for rights in verdicts if len(rights) >= k]
        if len(enough) < len(evaluated):
            result.left_out[k] = len(evaluated) - len(enough)
        if enough or k == 1:
            result.pass_at[k] = _mean([pass_at_k(len(rights), sum(rights), k) for rights in enough])
    if not means:
        result.notes.append("no reply has a verdict")
    _vote(result, [k for k in settings.k if k > 1], rule, evaluated)
    return result


def _vote(result: SetResult, ks: Sequence[int], rule: str, evaluated: Sequence[EvaluatedProblem]) -> None:
    """Fill in maj@k. The votes are those of the first k samples with a verdict."""
    if not ks:
        return
    if any(len(problem.answers) != len(problem.correct) for problem in evaluated):
        result.notes.append(f"no maj@k: the rule {rule} names no answers")
        return
    ballots = [
        [(answer, right) for answer, right in zip(problem.answers, problem.correct, strict=True) if right is not None]
        for problem in evaluated
    ]
    for k in ks:
        won = [
            maj_at_k([answer for answer, _ in ballot], [right for _, right in ballot], k)
            for ballot in ballots
            if len(ballot) >= k
        ]
        if won:
            result.maj_at[k] = _mean(won)


def _lengths(evaluated: Sequence[EvaluatedProblem]) -> Lengths:
    tokens = np.array([count for problem in evaluated for count in problem.tokens])
    return Lengths(
        mean=float(tokens.mean()),
        median=float(np.median(tokens)),
        p95=float(np.percentile(tokens, 95)),
        max=int(tokens.max()),
        truncated=sum(problem.truncated for problem in evaluated) / len(tokens),
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def metrics(result: EvaluationResult) -> Metrics:
    """One point for the trackers."""
    found: Metrics = {
        "eval/accuracy": result.accuracy,
        "eval/samples": float(sum(each.scored for each in result.sets)),
        "eval/errors": float(sum(each.problems * each.samples - each.scored for each in result.sets)),
        "eval/seconds": result.seconds,
        "eval/version_oldest": float(result.oldest.step),
        "eval/version_newest": float(result.newest.step),
    }
    for each in result.sets:
        lengths = each.lengths
        figures = {
            **{f"pass@{k}": value for k, value in each.pass_at.items()},
            **{f"maj@{k}": value for k, value in each.maj_at.items()},
            "errors": float(each.problems * each.samples - each.scored),
            **{f"length/{name}": float(getattr(lengths, name)) for name in ("mean", "median", "p95", "max")},
            "length/clip_ratio": lengths.truncated,
        }
        found |= {f"eval/{each.name}/{name}": value for name, value in figures.items()}
    return found
