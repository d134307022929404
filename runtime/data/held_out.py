"""The problems that evaluations ask, and no step trains on: the one place where they are read."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from runtime.config import Config
from runtime.data.handlers import load_problems
from runtime.data.prompts import Prompts, tokenise
from runtime.data.tokenizer import Tokenizer
from runtime.evaluation_sets import EvaluationData, evaluation_sets


class HeldOut(Struct, frozen=True):
    """A data set and its problems, no more than are asked."""

    settings: EvaluationData
    prompts: Prompts


def load_held_out(config: Config, tokenizer: Tokenizer) -> list[HeldOut]:
    """The problems of every set. Raises UserError for a file that cannot be used, or of which no prompt is left."""
    return [HeldOut(found, _prompts(found, tokenizer)) for found in evaluation_sets(config)]


def _prompts(found: EvaluationData, tokenizer: Tokenizer) -> Prompts:
    prompts = tokenise(load_problems(found.path, found.data, found.key), tokenizer, found.data.max_prompt_tokens, found.key)
    count = found.problems or len(prompts.problems)
    return replace(prompts, problems=prompts.problems[:count], tokens=prompts.tokens[:count])
