"""From files of problems to a file of prompts: read, check, render, encode, write.

Rows are read and checked in order by one thread; `workers` threads render and encode chunks of them. The library encodes
outside the interpreter's lock, which is where the time goes. Chunks are put together in the order of their rows, so that the
output has the same bytes for any number of workers.
"""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from runtime.data import prepared
from runtime.data.fields import MissingColumn, Rejected
from runtime.data.files import data_files
from runtime.data.handlers import Problem, RowReader, SourceRow, no_column, report, source_rows
from runtime.data.overlap import problem_key
from runtime.data.prepare_settings import PrepareSettings, column_key
from runtime.data.reading import count_rows
from runtime.data.tokenizer import Tokenizer
from runtime.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa

CHUNK_ROWS = 256
AHEAD = 2  # chunks under way for each worker

Progress = Callable[[int, int], None]  # rows done, rows in all


class Count(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the rows of one source."""

    rows: int
    kept: int
    dropped: dict[str, int]


class PreparedData(msgspec.Struct, kw_only=True):
    """What was prepared. `tokens` are those of the prompts kept."""

    path: str
    sources: dict[str, Count]
    prompts: int
    rows: int
    tokens: int
    longest: int  # tokens
    seconds: float

    def report(self) -> list[str]:
        """Lines for the terminal."""
        lines = [f"{source}: {report(found.rows, found.kept, found.dropped)}" for source, found in self.sources.items()]
        mean = self.tokens / self.prompts
        speed = self.rows / self.seconds
        lines.append(f"{self.path}: {self.prompts} prompts of {mean:.0f} tokens on average, {self.longest} at most")
        lines.append(f"{self.rows} rows in {self.seconds:.1f} s: {speed:.0f} rows/s")
        return lines


class _Item(msgspec.Struct, frozen=True):
    problem: Problem
    extra: tuple[Any, ...]  # values of the additional columns


class _Encoded(msgspec.Struct, frozen=True):
    kept: list[tuple[_Item, str, np.ndarray]]  # with rendered text and its tokens
    long: list[tuple[str, str]]  # source and reason of those that are too long


def prepare(settings: PrepareSettings, progress: Progress = lambda done, total: None) -> PreparedData:
    """Make the file that `settings` ask for. Raises UserError for rows, columns, a tokenizer or a disk that will not do."""
    began = time.monotonic()
    tokenizer = Tokenizer(
        settings.tokenizer_name_or_path,
        prompt_type=settings.prompt_type,
        prompt_type_path=settings.prompt_type_path,
        key="tokenizer_name_or_path",
        section="",
    )
    _ = tokenizer.template  # before the threads need it
    work = _Work(settings, tokenizer)
    total = sum(count_rows(file, key) for path, key in work.inputs() for file in data_files(path, key).files)
    with _one_thread_each_call(), ThreadPoolExecutor(settings.workers, "prepare") as pool:
        under_way: deque[Future[_Encoded]] = deque()
        for chunk in work.chunks(lambda done: progress(done, total)):
            under_way.append(pool.submit(work.encode, chunk))
            if len(under_way) >= AHEAD * settings.workers:
                work.collect(under_way.popleft().result())
        for future in under_way:
            work.collect(future.result())
    return work.finish(began)


class _Work:
    """One preparation: what the threads share, and what has come of it so far."""

    def __init__(self, settings: PrepareSettings, tokenizer: Tokenizer):
        self._settings = settings
        self._additional = settings.additional_keys
        self._tokenizer = tokenizer
        self._reader = RowReader(settings.row_format, settings.difficulty_key)
        self._known: set[int] = set()
        self._rows: Counter[str] = Counter()
        self._dropped: dict[str, Counter[str]] = {}
        self._kept: Counter[str] = Counter()
        self._tables: list[pa.Table] = []
        self._lengths: list[int] = []

    def inputs(self) -> list[tuple[str, str]]:
        """Each path with the key that names it."""
        if isinstance(self._settings.input, str):
            return [(self._settings.input, "input")]
        return [(path, f"input.{index}") for index, path in enumerate(self._settings.input)]

    def chunks(self, told: Callable[[int], None]) -> Iterator[list[_Item]]:
        """The rows that can be used, some at a time, in order. `told` is called every `log_interval` rows."""
        chunk: list[_Item] = []
        done = 0
        for path, key in self.inputs():
            for found in source_rows(path, key):
                item = self._item(found)
                if item is not None:
                    chunk.append(item)
                done += 1
                if done % self._settings.log_interval == 0:
                    told(done)
                if len(chunk) == CHUNK_ROWS:
                    yield chunk
                    chunk = []
        if chunk:
            yield chunk
        if done % self._settings.log_interval:
            told(done)

    def _item(self, found: SourceRow) -> _Item | None:
        self._rows[found.source] += 1
        try:
            problem = self._reader.problem(found)
            known = problem_key(problem.question)
            if known in self._known:
                raise Rejected("duplicate problem")
        except Rejected as reason:
            self._drop(found.source, str(reason))
            return None
        except MissingColumn as missing:
            raise no_column(column_key(missing.role), missing.column, found) from None
        self._known.add(known)
        for name in self._additional:
            if name not in found.row:
                raise no_column("dataset_additional_keys", name, found)
        return _Item(problem, tuple(found.row[name] for name in self._additional))

    def encode(self, chunk: list[_Item]) -> _Encoded:
        """Render and encode; runs in a thread of its own and touches nothing that others do."""
        texts = [self._tokenizer.template.render(item.problem.messages) for item in chunk]
        most, window = self._settings.max_prompt_length, self._settings.seq_length
        encoded = _Encoded([], [])
        for item, text, ids in zip(chunk, texts, self._tokenizer.encode_texts(texts), strict=True):
            if most and len(ids) > most:
                encoded.long.append((item.problem.source, f"prompt over {most} tokens"))
            elif window and len(ids) >= window:
                encoded.long.append((item.problem.source, f"no room for a reply in {window} tokens"))
            else:
                encoded.kept.append((item, text, ids))
        return encoded

    def collect(self, encoded: _Encoded) -> None:
        """Add a chunk to the output; called in the order of the rows."""
        import pyarrow as pa

        for source, reason in encoded.long:
            self._drop(source, reason)
        self._kept.update(item.problem.source for item, _, _ in encoded.kept)
        lengths = [len(ids) for _, _, ids in encoded.kept]
        self._lengths += lengths
        problems = [item.problem for item, _, _ in encoded.kept]
        values = np.concatenate([np.empty(0, np.int32), *(ids for _, _, ids in encoded.kept)])
        offsets = np.cumsum([0, *lengths], dtype=np.int32)
        columns: dict[str, Any] = {
            "id": pa.array([problem.id for problem in problems], pa.string()),
            "source": pa.array([problem.source for problem in problems], pa.string()),
            "problem": pa.array([problem.question for problem in problems], pa.string()),
            "text": pa.array([text for _, text, _ in encoded.kept], pa.string()),
            "tokens": pa.ListArray.from_arrays(pa.array(offsets), pa.array(values)),
            "label": pa.array([problem.label for problem in problems], pa.string()),
        }
        if self._settings.difficulty_key:
            columns[prepared.DIFFICULTY] = pa.array([problem.difficulty for problem in problems], pa.float64())
        for index, name in enumerate(self._additional):
            columns[name] = _array(name, [item.extra[index] for item, _, _ in encoded.kept])
        self._tables.append(pa.table(columns))

    def finish(self, began: float) -> PreparedData:
        """Write the file. Raises UserError when no prompt is left, or the file cannot be written."""
        import pyarrow as pa

        dropped = _by_count(sum(self._dropped.values(), Counter[str]()))
        rows = self._rows.total()
        if not self._lengths:
            raise UserError(f"input: no prompt is left of {report(rows, 0, dropped)}")
        try:
            table = pa.concat_tables(self._tables, promote_options="permissive").combine_chunks()
        except pa.ArrowException as error:
            raise UserError(f"dataset_additional_keys: values of several types: {str(error).splitlines()[0]}") from error
        info = prepared.Info(
            format=prepared.FORMAT,
            prompt_type=self._settings.prompt_type,
            tokenizer=self._tokenizer.identity,
            template=self._tokenizer.template.identity,
            rows=rows,
            dropped=dropped,
        )
        output = self._settings.output
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            prepared.write(output, table, info)
        except OSError as error:
            raise UserError(f"output_prefix: {output}: {(error.strerror or str(error)).lower()}") from error
        return PreparedData(
            path=str(output),
            sources={
                source: Count(rows=count, kept=self._kept[source], dropped=_by_count(self._dropped.get(source, {})))
                for source, count in self._rows.items()
            },
            prompts=len(self._lengths),
            rows=rows,
            tokens=sum(self._lengths),
            longest=max(self._lengths),
            seconds=time.monotonic() - began,
        )

    def _drop(self, source: str, reason: str) -> None:
        self._dropped.setdefault(source, Counter())[reason] += 1


def _by_count(dropped: Mapping[str, int]) -> dict[str, int]:
    """The most frequent reason first. In which order they came up depends on how many chunks were under way."""
    return dict(sorted(dropped.items(), key=lambda item: (-item[1], item[0])))


def _array(name: str, values: list[Any]) -> pa.Array:
    import pyarrow as pa

    try:
        return pa.array(values)
    except pa.ArrowException as error:
        raise UserError(f"dataset_additional_keys: '{name}' holds values of several types: {error}") from error


@contextmanager
def _one_thread_each_call() -> Iterator[None]:
    """The library would spread each call over all cores; here the number of workers says how many are at work."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
