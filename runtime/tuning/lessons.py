"""What `sluice tune` teaches: the conversations of `data.train`, rendered and encoded once, and which of them come when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from runtime.config import Config
from runtime.data import prepared
from runtime.data.handlers import Problem, load_problems, report
from runtime.data.order import Share
from runtime.data.prompts import PromptStream
from runtime.data.source_settings import row_format_of, sources
from runtime.data.sources import column_key
from runtime.data.templates import ChatTemplate, Message
from runtime.data.tokenizer import Tokenizer
from runtime.errors import UserError
from runtime.tuning.conversations import TaughtRow, taught_row, turns


class Lessons(NamedTuple):
    """Conversations, those of several sources one after the other, and the rows of each. `said`: what became of the files'."""

    problems: list[Problem]
    rows: list[list[TaughtRow]]
    shares: list[Share]
    said: str

    def stream(self, config: Config) -> PromptStream:
        """In which order they come."""
        return PromptStream(self.problems, config.run.seed, config.data.shuffle, self.shares, config.data.curriculum)


def read_lessons(config: Config, tokenizer: Tokenizer) -> Lessons:
    """All conversations of `data.train`: a row's prompt, or chat, and its label as the reply. Raises UserError."""
    data = config.data
    problems: list[Problem] = []
    rows: list[list[TaughtRow]] = []
    shares: list[Share] = []
    dropped: Counter[str] = Counter()
    for key, source in sources(data):
        if prepared.is_prepared(Path(source.path)):
            raise UserError(f"{key}: {source.path} was made by sluice data prepare, of prompts; name the files it was made of")
        difficulty = data.curriculum.key if data.curriculum else ""
        found = load_problems(source.path, row_format_of(source, data), key, difficulty, partial(column_key, key))
        encoded = _encoded(found.problems, tokenizer)
        short = [at for at, each in enumerate(encoded) if all(len(row.tokens) <= config.tune.max_tokens for row in each)]
        dropped.update({**found.dropped, f"conversation over {config.tune.max_tokens} tokens": len(encoded) - len(short)})
        if not short:
            raise UserError(
                f"{key}: {source.path}: no conversation has {config.tune.max_tokens} tokens or less; see tune.max_tokens"
            )
        problems += [found.problems[at] for at in short]
        rows += [encoded[at] for at in short]
        shares.append(Share(len(short), source.weight))
    left_out = {reason: count for reason, count in dropped.items() if count}
    return Lessons(problems, rows, shares, report(len(problems) + sum(left_out.values()), len(problems), left_out))


def _encoded(problems: list[Problem], tokenizer: Tokenizer) -> list[list[TaughtRow]]:
    """The rows of each conversation."""
    template = tokenizer.template

    def render(messages: Sequence[Message], prompt: bool) -> str:
        return template.render(messages, prompt) if isinstance(template, ChatTemplate) else template.render(messages)

    texts = [
        turns(render, [*each.messages, {"role": "assistant", "content": each.label}], template.origin) for each in problems
    ]
    encoded = iter(tokenizer.encode_texts([part for rows in texts for row in rows for part in row]))
    return [[taught_row([next(encoded).tolist() for _ in row], tokenizer.stop_ids) for row in rows] for rows in texts]
