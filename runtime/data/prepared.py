"""Prepared prompts: a Parquet file with one row a problem, which training reads as it is.

| column | type | what it holds |
| --- | --- | --- |
| id | string | source and position: "gsm8k/train:17" |
| source | string | the file's folder and stem: "gsm8k/train" |
| problem | string | the last message of the user, without any template |
| text | string | the prompt as rendered |
| tokens | list of int32 | `text`, encoded |
| label | string | the label for the reward rules |
| difficulty | double | if one was asked for |

and the additional columns asked for. The file's metadata have hashes of the tokenizer and the template, so that a file is
refused if another tokenizer or template would make other prompts."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from runtime.config import Data, RowFormat, RowFormatChoice, Source
from runtime.data.handlers import Problem, ProblemSet, Rejected, difficulty, environment_of, extra, load_problems
from runtime.data.prompts import Share
from runtime.data.reading import PARQUET
from runtime.data.tokenizer import Tokenizer
from runtime.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa


# ---- Source settings
# The files of a configuration, and their row formats, before any file is opened.


def sources(data: Data) -> list[tuple[str, Source]]:
    """Return the files to train on, each with the configuration key of its path."""
    if isinstance(data.train, str):
        return [("data.train", Source(path=data.train))] if data.train else []
    return [(f"data.train.{index}.path", source) for index, source in enumerate(data.train)]


def row_format_of(choice: RowFormatChoice, data: Data) -> RowFormat:
    """Return the row format of a file: as `choice` says, else as `data` says."""
    names = RowFormat.__struct_fields__
    own = {name: getattr(choice, name) for name in names} | {"columns": data.columns | choice.columns}
    return RowFormat(**{name: getattr(data, name) if value is None else value for name, value in own.items()})


class Prompts(ProblemSet, kw_only=True):
    """Problems with their prompts' tokens, ready for admission."""

    tokens: list[np.ndarray]  # int32 [P] each, read-only
    shares: list[Share] = msgspec.field(default_factory=list)  # of several sources, whose problems stand one after the other


def tokenise(found: ProblemSet, tokenizer: Tokenizer, max_prompt_tokens: int, key: str = "data.train") -> Prompts:
    """Render and encode every prompt once. Longer prompts are dropped and counted. Raises UserError if none is left."""
    problems: list[Problem] = []
    tokens: list[np.ndarray] = []
    encoded = iter(tokenizer.encode_chats([each.messages for each in found.problems if each.messages]))
    for problem in found.problems:
        ids = next(encoded) if problem.messages else np.zeros(0, np.int32)
        if len(ids) <= max_prompt_tokens:
            ids.setflags(write=False)
            problems.append(problem)
            tokens.append(ids)
    dropped = dict(found.dropped)
    if len(problems) < len(found.problems):
        dropped[f"prompt over {max_prompt_tokens} tokens"] = len(found.problems) - len(problems)
    return not_empty(Prompts(problems=problems, tokens=tokens, rows=found.rows, dropped=dropped), key)


def not_empty(prompts: Prompts, key: str) -> Prompts:
    """Return `prompts`. Raises UserError if none is left; `key` is the configuration key of their file."""
    if not prompts.problems:
        raise UserError(f"{key}: no prompt is left of {prompts.report()}; see data.max_prompt_tokens")
    return prompts


def training_prompts(data: Data, tokenizer: Tokenizer) -> Prompts:
    """Return all problems of `data.train`, one source after the other. Raises UserError."""
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
    return Prompts(
        problems=[problem for prompts in read for problem in prompts.problems],
        tokens=[ids for prompts in read for ids in prompts.tokens],
        rows=sum(prompts.rows for prompts in read),
        dropped=dict(sum((Counter(prompts.dropped) for prompts in read), Counter())),
        shares=[Share(len(prompts.problems), source.weight) for prompts, (_, source) in zip(read, found, strict=True)],
    )


def check_environments(problems: Sequence[Problem], known: Collection[str]) -> None:
    """Check that rows name `known` environments. Raises UserError for a row that does not."""
    for problem in problems:
        if problem.environment not in known and (known or problem.environment):
            allowed = ", ".join(known) or "there is none"
            raise UserError(f"{problem.id}: environment '{problem.environment}' is not one of services.environment: {allowed}")


def read_prompts(
    path: str, row_format: RowFormat, tokenizer: Tokenizer, max_prompt_tokens: int, key: str, difficulty_key: str = ""
) -> Prompts:
    """Return the prompts of one file or folder, prepared or not. `key`: of the path. Raises UserError for unusable files."""
    if is_prepared(Path(path)):
        return read(Path(path), tokenizer, max_prompt_tokens, key, difficulty_key, row_format)
    return tokenise(load_problems(path, row_format, key, difficulty_key), tokenizer, max_prompt_tokens, key)


FORMAT = 1
METADATA = b"sluice.prepared"
COLUMNS = ("id", "source", "problem", "text", "tokens", "label")
DIFFICULTY = "difficulty"
ROW_GROUP = 4096  # rows


class Info(msgspec.Struct, kw_only=True):
    """The metadata of the file."""

    format: int
    prompt_type: str
    tokenizer: str  # `Tokenizer.identity`
    template: str  # `identity` of its template
    rows: int  # read
    dropped: dict[str, int]


def write(path: Path, table: pa.Table, info: Info) -> None:
    """Replace `path` by `table` atomically. Raises OSError."""
    import pyarrow.parquet as pq

    table = table.replace_schema_metadata({METADATA: msgspec.json.encode(info)})
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        pq.write_table(table, partial, row_group_size=ROW_GROUP, compression="zstd")
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def is_prepared(path: Path) -> bool:
    """Return whether `path` is a Parquet file made by `write`."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        if file.read(len(PARQUET)) != PARQUET:
            return False
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return METADATA in (pq.read_schema(path).metadata or {})
    except pa.ArrowException:
        return False  # reading its rows reports the fault


def read(
    path: Path, tokenizer: Tokenizer, max_prompt_tokens: int, key: str, difficulty_key: str, row_format: RowFormat
) -> Prompts:
    """Return the prompts of a prepared file, mapped into memory. Of `row_format` additional columns and environment count.

    Prompts over `max_prompt_tokens`, or without the difficulty asked for, are dropped and counted. Raises UserError, with the
    configuration key `key`, if tokenizer or template differ from the file's, or no prompt is left."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    environment_key = row_format.columns.get("environment", "")
    additional = [*row_format.additional_keys, *([environment_key] if environment_key else [])]
    more = {"data.curriculum.key": [difficulty_key] if difficulty_key else [], "data.additional_keys": additional}
    try:
        schema = pq.read_schema(path)
        for named, name in ((named, name) for named, names in more.items() for name in names):
            if name not in schema.names:
                raise UserError(f"{named}: {path} has no column {name!r} (its columns: {', '.join(schema.names)})")
        info = _info(schema.metadata[METADATA], tokenizer, path, key)
        columns = dict.fromkeys(["id", "source", "problem", "label", *chain(*more.values()), "tokens"])
        table = pq.read_table(path, columns=[*columns], memory_map=True)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{key}: {path}: not a prepared file: {str(error).splitlines()[0]}") from error
    encoded: list[np.ndarray] = []  # read-only int32 views into the column's buffers
    for chunk in table["tokens"].chunks:
        values, bounds = (part.to_numpy(zero_copy_only=True) for part in (chunk.values, chunk.offsets))
        encoded += [values[start:end] for start, end in pairwise(bounds)]
    dropped = dict(info.dropped)
    problems: list[Problem] = []
    tokens: list[np.ndarray] = []
    for row, ids in zip(table.drop_columns("tokens").to_pylist(), encoded, strict=True):
        try:
            level = difficulty(row, difficulty_key) if difficulty_key else 0.0
            carried = extra(row, additional)
            environment = environment_of(carried, row_format.environment, environment_key)
            if len(ids) > max_prompt_tokens:
                raise Rejected(f"prompt over {max_prompt_tokens} tokens")
        except Rejected as reason:
            dropped[str(reason)] = dropped.get(str(reason), 0) + 1
            continue
        messages = [{"role": "user", "content": row["problem"]}]
        problems.append(Problem(row["id"], messages, row["label"], row["source"], level, carried, environment))
        tokens.append(ids)
    return not_empty(Prompts(problems=problems, tokens=tokens, rows=info.rows, dropped=dropped), key)


def _info(text: bytes, tokenizer: Tokenizer, path: Path, key: str) -> Info:
    try:
        info = msgspec.json.decode(text, type=Info)
    except msgspec.DecodeError as error:
        raise UserError(f"{key}: {path}: not a prepared file: {error}") from error
    if info.format != FORMAT:
        raise UserError(f"{key}: {path} is of format {info.format}, not {FORMAT}; prepare it again")
    if info.tokenizer != tokenizer.identity:
        raise UserError(f"{key}: {path} was prepared with another tokenizer than that of {tokenizer.folder}; prepare it again")
    if info.template != tokenizer.template.identity:
        raise UserError(
            f"{key}: {path} was prepared with prompt_type {info.prompt_type}, which is not the template of "
            f"data.prompt_type {tokenizer.prompt_type}; set that, or prepare it again"
        )
    return info
