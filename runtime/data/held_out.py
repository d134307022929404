"""The problems that evaluations ask, and no step trains on: the one place where they are read."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from runtime.config import Config
from runtime.data.prompts import Prompts
from runtime.data.sources import read_prompts
from runtime.data.tokenizer import Tokenizer
from runtime.evaluation_sets import EvaluationData, evaluation_sets


class HeldOut(Struct, frozen=True):
    """A data set and its problems, no more than are asked."""

    settings: EvaluationData
    prompts: Prompts


def load_held_out(config: Config, tokenizer: Tokenizer) -> list[HeldOut]:
    """The problems of every set. Raises UserError for a file that cannot be used, or of which no prompt is left."""
    longest = config.data.max_prompt_tokens
    return [HeldOut(found, _prompts(found, tokenizer, longest)) for found in evaluation_sets(config)]


def _prompts(found: EvaluationData, tokenizer: Tokenizer, max_prompt_tokens: int) -> Prompts:
    prompts = read_prompts(found.path, found.layout, tokenizer, max_prompt_tokens, found.key)
    count = found.problems or len(prompts.problems)
    return replace(prompts, problems=prompts.problems[:count], tokens=prompts.tokens[:count])
