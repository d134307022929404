"""The results of an evaluation: the figures of each data set, as JSON and as metrics. `RUN/evaluations/step-00000050/` holds
SET.jsonl, with every reply, and `results.json`, which is written last: an evaluation without it was cut short."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

import msgspec
import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from runtime import config, run_files
from runtime.algorithms.evaluation import clustered_standard_error, maj_at_k, pass_at_k
from runtime.config import Config, EvaluationSet, RowFormat, Rule
from runtime.data.handlers import Problem
from runtime.data.prepare import keep_apart
from runtime.data.prepared import Prompts, read_prompts, row_format_of
from runtime.data.tokenizer import Tokenizer
from runtime.errors import UserError
from runtime.telemetry.metrics import Metrics
from runtime.telemetry.shown import LiteralTable
from runtime.types import ENVIRONMENT_COLUMN, FinishReason, GroupPayload, PolicyVersion, Sample, Scores, TextDecoder

# ---- Sets
# The data sets of an evaluation, by the configuration.

HELD_OUT = "held_out"
"""The name of the set of `data.eval`."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")  # of a file, and part of a metric's name


class EvaluationData(Struct, frozen=True, kw_only=True):
    """One set with all settings filled in. `key` is the configuration key of its file."""

    name: str
    path: str
    key: str
    row_format: RowFormat
    problems: int  # the first so many; 0 = all
    samples: int
    k: tuple[int, ...]  # ascending, 1 first
    temperature: float
    max_new_tokens: int


def evaluation_sets(config: Config) -> list[EvaluationData]:
    """Return every set of the configuration: the set of `data.eval` first, then `evaluation.sets`."""
    named = [(f"evaluation.sets.{index}.path", entry) for index, entry in enumerate(config.evaluation.sets)]
    if config.data.eval:
        named.insert(0, ("data.eval", EvaluationSet(name=HELD_OUT, path=config.data.eval)))
    settings = config.evaluation
    return [
        EvaluationData(
            name=entry.name,
            path=entry.path,
            key=key,
            row_format=row_format_of(entry, config.data),
            problems=settings.problems if entry.problems is None else entry.problems,
            samples=entry.samples or settings.samples,
            k=tuple(sorted({1, *(entry.k or settings.k)})),
            temperature=settings.temperature if entry.temperature is None else entry.temperature,
            max_new_tokens=entry.max_new_tokens or _longest(config),
        )
        for key, entry in named
    ]


def judge_of(config: Config) -> Rule | None:
    """Return the rule that decides what is correct: the first rule; without rules, the reward by the environment."""
    rewards = config.rewards
    if rewards.rules:
        return rewards.rules[0]
    return Rule(name=ENVIRONMENT_COLUMN) if config.gateway is not None and rewards.environment else None


def set_faults(config: Config) -> Iterator[str]:
    """Yield one line for each wrong value of a set, with the YAML path of the value to change."""
    if config.warmup is not None and not config.data.train and not config.data.eval:
        config = replace(config, data=replace(config.data, eval="eval.jsonl"))  # the warm-up will make it
    seen: set[str] = set()
    for found in evaluation_sets(config):
        own = found.key.rpartition(".")[0] if found.key != "data.eval" else "evaluation"
        if not _NAME.fullmatch(found.name):
            yield f"{own}.name: '{found.name}' is not letters, digits, '_', '.' and '-', with a letter or digit first"
        elif found.name in seen:
            why = f"; {HELD_OUT} is the set of data.eval" if found.name == HELD_OUT else ""
            yield f"{own}.name: '{found.name}' names two sets{why}"
        seen.add(found.name)
        if (most := max(found.k)) > found.samples:
            yield f"{own}.k: {most} is more than the {found.samples} samples to a problem ({own}.samples)"
        elif most > 1 and found.temperature == 0:
            yield f"{own}.temperature: 0 makes all samples of a problem alike; k {most} needs a temperature above 0"
        if found.max_new_tokens > (limit := _longest(config)):
            yield f"{own}.max_new_tokens: {found.max_new_tokens} is more than evaluation.max_new_tokens, {limit}"


def _longest(config: Config) -> int:
    return config.evaluation.max_new_tokens or config.sampling.max_new_tokens


# ---- Table
# The results of evaluations as a table: a row a figure, a column an evaluation.


def render(results: Sequence[EvaluationResult]) -> LiteralTable:
    """Return a table of the figures of every set in each of `results`, with notes below."""
    by_name = [{each.name: each for each in result.sets} for result in results]
    caption = "\n".join(
        f"{name}, step {result.step}: {note}"
        for result, sets in zip(results, by_name, strict=True)
        for name, each in sets.items()
        for note in _notes(each)
    )
    table = LiteralTable(title="Evaluation", title_justify="left", title_style="bold", caption=caption, caption_justify="left")
    table.add_column("set", style="cyan", no_wrap=True)
    table.add_column("figure")
    for result in results:
        table.add_column(f"step {result.step}", justify="right")
    for name in dict.fromkeys(name for sets in by_name for name in sets):
        columns = [dict(_figures(sets[name])) if name in sets else {} for sets in by_name]
        figures = list(dict.fromkeys(figure for column in columns for figure in column))
        for figure in figures:
            cells = [column.get(figure, "–") for column in columns]
            table.add_row(name if figure == figures[0] else "", figure, *cells, end_section=figure == figures[-1])
    return table


def _figures(each: SetResult) -> Iterator[tuple[str, str]]:
    yield "problems × samples", f"{each.problems:,} × {each.samples}"
    for k, value in each.pass_at.items():
        error = f" ± {100 * each.standard_error:.1f}" if k == 1 and each.standard_error is not None else ""
        yield f"pass@{k}", f"{value:.1%}{error}"
    for k, value in each.maj_at.items():
        yield f"maj@{k}", f"{value:.1%}"
    lengths = each.lengths
    yield "tokens: mean, median", f"{lengths.mean:,.1f}, {lengths.median:,.0f}"
    yield "tokens: p95, max", f"{lengths.p95:,.0f}, {lengths.max:,}"
    yield "cut off by length", f"{lengths.truncated:.1%}"


def _notes(each: SetResult) -> Iterator[str]:
    yield from each.notes
    if each.errors:
        yield "errors: " + ", ".join(f"{count:,} {reason}" for reason, count in each.errors.items())
    for k, count in each.left_out.items():
        yield f"too few verdicts for @{k}: {count:,} of {each.problems:,} problems"


RESULTS = "results.json"
STEP = "step-{:08d}"  # the folder of an evaluation after so many steps
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
    """The figures of one data set. A reply has no verdict if a rule failed: it counts in `errors` and in the lengths alone.
    pass@k and maj@k are means over the problems with at least k verdicts; `left_out` counts the other problems."""

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
    """One evaluation after `step` optimizer steps. `accuracy`: the unweighted mean of the sets' pass@1. `oldest` and `newest`
    are the versions of the oldest and the newest token, as [incarnation, step]."""

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
    return run_dir / run_files.EVALUATIONS / STEP.format(step)


def folders(run_dir: Path) -> list[tuple[int, Path]]:
    """Return step and folder of each evaluation of the run, by step, those that were cut short included."""
    root = run_dir / run_files.EVALUATIONS
    found = ((_FOLDER.fullmatch(path.name), path) for path in root.iterdir()) if root.is_dir() else ()
    return sorted((int(match[1]), path) for match, path in found if match)


def forget_after(run_dir: Path, step: int) -> None:
    """Remove the evaluations of later steps, after a run went back to `step`."""
    for later, folder in folders(run_dir):
        if later > step:
            shutil.rmtree(folder)


def read(run_dir: Path) -> list[EvaluationResult]:
    """Return the complete evaluations of the run, by step. Raises UserError for an unreadable one."""
    results = []
    for _, folder in folders(run_dir):
        path = folder / RESULTS
        if path.exists():
            results.append(run_files.read_json(path, EvaluationResult, "the results of an evaluation"))
    return results


def set_result(settings: EvaluationData, rule: str, evaluated: Sequence[EvaluatedProblem]) -> SetResult:
    """Return the figures of the problems `evaluated`. `rule` is the name of the rule that gave the verdicts."""
    verdicts = [[right for right in problem.correct if right is not None] for problem in evaluated]
    means = [fmean(rights) for rights in verdicts if rights]
    tokens = np.array([count for problem in evaluated for count in problem.tokens])
    lengths = Lengths(
        mean=float(tokens.mean()),
        median=float(np.median(tokens)),
        p95=float(np.percentile(tokens, 95)),
        max=int(tokens.max()),
        truncated=sum(problem.truncated for problem in evaluated) / len(tokens),
    )
    result = SetResult(
        name=settings.name,
        path=settings.path,
        problems=len(evaluated),
        samples=settings.samples,
        scored=sum(map(len, verdicts)),
        pass_at={},
        maj_at={},
        standard_error=clustered_standard_error(means),
        lengths=lengths,
        errors=dict(sum((Counter(problem.errors) for problem in evaluated), Counter())),
        notes=[] if means else ["no reply has a verdict"],
    )
    names_answers = all(len(problem.answers) == len(problem.correct) for problem in evaluated)
    if settings.k[-1] > 1 and not names_answers:
        result.notes.append(f"no maj@k: the rule {rule} names no answers")
    for k in settings.k:
        enough = [(problem, rights) for problem, rights in zip(evaluated, verdicts, strict=True) if len(rights) >= k]
        if len(enough) < len(evaluated):
            result.left_out[k] = len(evaluated) - len(enough)
        if enough or k == 1:
            result.pass_at[k] = fmean([pass_at_k(len(rights), sum(rights), k) for _, rights in enough] or [0.0])
        if enough and k > 1 and names_answers:  # the first k samples with a verdict vote
            result.maj_at[k] = fmean(maj_at_k(_ballot(problem), rights, k) for problem, rights in enough)
    return result


def _ballot(problem: EvaluatedProblem) -> list[str | None]:
    """Return the answers of the samples with a verdict."""
    return [answer for answer, right in zip(problem.answers, problem.correct, strict=True) if right is not None]


def metrics(result: EvaluationResult) -> Metrics:
    """Return one point for the trackers."""
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


# ---- Held out
# The problems of evaluations, on which no step trains. They are read here alone.


class HeldOut(Struct, frozen=True):
    """A data set and the problems of it that are asked."""

    settings: EvaluationData
    prompts: Prompts


def load_held_out(config: Config, tokenizer: Tokenizer, train: Sequence[Problem] = ()) -> list[HeldOut]:
    """Return the problems of every set. Raises UserError for an unusable file, a file without a usable prompt, and, unless
    `data.allow_overlap`, a file that shares problems with those to `train` on, asked or not."""
    held_out = []
    for found in evaluation_sets(config):
        prompts = read_prompts(found.path, found.row_format, tokenizer, config.data.max_prompt_tokens, found.key)
        keep_apart(train, prompts.problems, found.key, config.data.allow_overlap)
        count = found.problems or len(prompts.problems)
        held_out.append(HeldOut(found, replace(prompts, problems=prompts.problems[:count], tokens=prompts.tokens[:count])))
    return held_out


# ---- Replies
# Every reply of an evaluation, as JSON lines: `RUN/evaluations/step-00000050/SET.jsonl`.

LONGEST = 1 << 26  # bytes of a line
SUFFIX = ".jsonl"


class Generation(Struct, kw_only=True):
    """One reply, one line; the last branch of an episode. Prompt and reply are text with special tokens."""

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
    (prompt,) = text.decode_batch([parts[0][0].prompt], skip_special=False)
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


def read_replies(path: Path) -> Iterator[Generation]:
    """Yield the replies in a file, without a last line that is still being written. Raises UserError."""
    decode = msgspec.json.Decoder(Generation).decode
    try:
        with run_files.reading(path), run_files.regular(path, None).open("rb") as file:
            while (line := file.readline(LONGEST)).endswith(b"\n"):
                yield decode(line)
    except run_files.NOT_DECODED as error:
        raise UserError(f"{path}: not the replies of an evaluation: {error}") from error
