"""The problems that evaluations ask, and no step trains on: the one place where they are read."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from runtime.config import Config, Data
from runtime.data.handlers import Problem
from runtime.data.overlap import keep_apart
from runtime.data.prompts import Prompts
from runtime.data.sources import read_prompts
from runtime.data.tokenizer import Tokenizer
from runtime.evaluation.sets import EvaluationData, evaluation_sets


class HeldOut(Struct, frozen=True):
    """A data set and its problems, no more than are asked."""

    settings: EvaluationData
    prompts: Prompts


def load_held_out(config: Config, tokenizer: Tokenizer, train: Sequence[Problem] = ()) -> list[HeldOut]:
    """The problems of every set.

    Raises UserError for a file that cannot be used, of which no prompt is left, or which has problems in common with those to
    `train` on, asked or not (unless `data.allow_overlap`).
    """
    return [HeldOut(found, _prompts(found, config.data, tokenizer, train)) for found in evaluation_sets(config)]


def _prompts(found: EvaluationData, data: Data, tokenizer: Tokenizer, train: Sequence[Problem]) -> Prompts:
    prompts = read_prompts(found.path, found.row_format, tokenizer, data.max_prompt_tokens, found.key)
    keep_apart(train, prompts.problems, found.key, data.allow_overlap)
    count = found.problems or len(prompts.problems)
    return replace(prompts, problems=prompts.problems[:count], tokens=prompts.tokens[:count])
