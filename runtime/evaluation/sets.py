"""Which data sets an evaluation has, by the configuration. Reading them is `runtime.evaluation.held_out`'s."""

from __future__ import annotations

import re
from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from runtime.config import Config, EvaluationSet, RowFormat, Rule
from runtime.data.source_settings import row_format_of
from runtime.types import ENVIRONMENT_COLUMN

HELD_OUT = "held_out"
"""What the set of `data.eval` is called."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")  # of a file, and part of a metric's name


class EvaluationData(Struct, frozen=True, kw_only=True):
    """One set with everything filled in. `key`: the configuration key that names its file; `row_format`: how its rows are."""

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
    """Every set of the configuration: that of `data.eval` first, then `evaluation.sets`."""
    named = [(f"evaluation.sets.{index}.path", entry) for index, entry in enumerate(config.evaluation.sets)]
    if config.data.eval:
        named.insert(0, ("data.eval", EvaluationSet(name=HELD_OUT, path=config.data.eval)))
    return [_filled(config, key, entry) for key, entry in named]


def judge_of(config: Config) -> Rule | None:
    """Whose verdicts an evaluation's figures are: the first rule's; without any, those of whoever plays the episodes."""
    rewards = config.rewards
    if rewards.rules:
        return rewards.rules[0]
    return Rule(name=ENVIRONMENT_COLUMN) if config.gateway is not None and rewards.environment else None


def set_faults(config: Config) -> Iterator[str]:
    """One line for each value of a set that cannot be, by the YAML path of the value to change."""
    if config.warmup is not None and not config.data.train and not config.data.eval:
        config = replace(config, data=replace(config.data, eval="eval.jsonl"))  # which the warm-up will make
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


def _filled(config: Config, key: str, entry: EvaluationSet) -> EvaluationData:
    settings = config.evaluation
    return EvaluationData(
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


def _longest(config: Config) -> int:
    return config.evaluation.max_new_tokens or config.sampling.max_new_tokens
