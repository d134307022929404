"""From the paths of a configuration to prompts that are ready for admission."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from runtime.config import Data, RowFormat
from runtime.data import prepared
from runtime.data.handlers import Problem, data_key, environment_of, load_problems, role_key
from runtime.data.order import Share
from runtime.data.prompts import Prompts, tokenise
from runtime.data.source_settings import row_format_of, sources
from runtime.data.tokenizer import Tokenizer
from runtime.errors import UserError


def training_prompts(data: Data, tokenizer: Tokenizer) -> Prompts:
    """All problems of `data.train`, those of several sources one after the other. Raises UserError."""
    difficulty_key = data.curriculum.key if data.curriculum else ""
    found = sources(data)
    read = [
        read_prompts(source.path, row_format_of(source, data), tokenizer, data.max_prompt_tokens, key, difficulty_key)
        for key, source in found
    ]
    for prompts, (_, source) in zip(read, found, strict=True):
        if source.reference:
            prompts.problems = [replace(problem, reference=source.reference) for problem in prompts.problems]
    if len(read) == 1:
        return read[0]
    dropped: dict[str, int] = {}
    for prompts in read:
        for reason, count in prompts.dropped.items():
            dropped[reason] = dropped.get(reason, 0) + count
    return Prompts(
        problems=[problem for prompts in read for problem in prompts.problems],
        tokens=[ids for prompts in read for ids in prompts.tokens],
        rows=sum(prompts.rows for prompts in read),
        dropped=dropped,
        shares=[Share(len(prompts.problems), source.weight) for prompts, (_, source) in zip(read, found, strict=True)],
    )


def check_environments(problems: Sequence[Problem], known: Collection[str]) -> None:
    """Raises UserError for a row that names an environment which is none of `known`."""
    for problem in problems:
        if problem.environment not in known and (known or problem.environment):
            allowed = ", ".join(known) or "there is none"
            raise UserError(f"{problem.id}: environment '{problem.environment}' is not one of services.environment: {allowed}")


def read_prompts(
    path: str, row_format: RowFormat, tokenizer: Tokenizer, max_prompt_tokens: int, key: str, difficulty_key: str = ""
) -> Prompts:
    """The prompts of one file or folder, prepared or not. `key` is the configuration key that named the path.

    Raises UserError for what cannot be used.
    """
    if prepared.is_prepared(Path(path)):
        of, column = row_format.environment, row_format.environment_key
        names = [*row_format.additional_keys, *([column] if column else [])]
        found = prepared.read(Path(path), tokenizer, max_prompt_tokens, key, difficulty_key, names)
        named = [replace(each, environment=environment_of(each.extra, of, column)) for each in found.problems]
        return replace(found, problems=named)

    problems = load_problems(path, row_format, key, difficulty_key, partial(column_key, key))
    return tokenise(problems, tokenizer, max_prompt_tokens, key)


def column_key(key: str, role: str) -> str:
    """The key that names the column of `role` in the file that `key` names."""
    return data_key(role) if role == "difficulty" or key.count(".") == 1 else f"{key.rpartition('.')[0]}.{role_key(role)}"
