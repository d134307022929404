"""From files of problems to a file of prompts: read, check, render, encode, write.

One thread reads and checks rows in order; `workers` threads render and encode chunks of rows. Encoding takes most of the time,
and the library encodes outside the interpreter's lock. Chunks are joined in order: the bytes do not depend on `workers`."""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import xxhash
from msgspec import field

from runtime.config import Column, NonNegative, Positive, RowFormat, Section
from runtime.config.loading import load_other
from runtime.data import prepared
from runtime.data.handlers import (
    HANDLERS,
    MODEL,
    MissingColumn,
    Problem,
    Rejected,
    RowReader,
    SourceRow,
    no_column,
    prompt_type_faults,
    report,
    source_rows,
)
from runtime.data.prepared import COLUMNS, DIFFICULTY
from runtime.data.reading import data_files
from runtime.data.tokenizer import Tokenizer
from runtime.errors import ConfigError, UserError
from runtime.registry import OWN
from runtime.run_files import reading

if TYPE_CHECKING:
    import pyarrow as pa


# ---- Prepare settings
# The keys of the file for `sluice data prepare`, with defaults and checks. Names are MindSpeed-RL's where it has such a key.

SUFFIX = ".parquet"
LABELS = "labels"  # MindSpeed-RL's name of the label, which the output always has

# Further keys of MindSpeed-RL's files, and what to do about them here.
_FORMATS = "leave it out; prompts are always made one by one, for training by reinforcement"
ADVICE = {
    "handler_name": "is called handler here: plain, gsm8k, alpaca, r1, math, math17k, or FILE.py:NAME",
    "tokenizer_type": "leave it out; tokenizer.json says what it is",
    "tokenizer_not_use_fast": "leave it out; tokenizer.json is used",
    "vocab_file": "leave it out; tokenizer.json has the vocabulary",
    "merge_file": "leave it out; tokenizer.json has the merges",
    "streaming": "leave it out; rows are read as they are needed",
    "overwrite_cache": "leave it out; there is no cache",
    "cache_dir": "leave it out; there is no cache",
    "dataset_impl": "leave it out; the output is Parquet",
    "interleave_probs": "is the weight of each file in data.train, for training",
    "seed": "is run.seed, for training; the output keeps the order of the input",
    "json_keys": "is called map_keys here",
    "enable_thinking": "leave it out; a model's own chat template says how it thinks, or a template in prompt_type_path",
    **dict.fromkeys(("pack", "neat_pack", "append_eod", "split_sentences", "keep_newlines", "n_subs"), _FORMATS),
    **dict.fromkeys(("make_vocab_size_divisible_by", "pad_vocab_size_to", "placeholder_token", "reward_tokens"), _FORMATS),
    **dict.fromkeys(("merge_group_keys", "script_data_dir"), _FORMATS),
}
_THEIR_HANDLERS = {
    "AlpacaStyleInstructionHandler": "alpaca",
    "R1AlpacaStyleInstructionHandler": "r1",
    "Math17kAlpacaStyleInstructionHandler": "math17k",
}


class MapKeys(Section, frozen=True):
    """Names of columns. null: the handler's own; "": none."""

    prompt: str | None = None
    query: str | None = None
    response: str | None = None
    system: str | None = None


class PrepareSettings(Section, frozen=True):
    """The settings of `sluice data prepare`."""

    input: str | list[str]
    tokenizer_name_or_path: str
    output_prefix: str
    handler: str = "plain"
    map_keys: MapKeys = MapKeys()
    system_prompt: str = ""
    dataset_additional_keys: list[str] = field(default_factory=list)
    difficulty_key: str = ""  # "" = no column `difficulty`
    prompt_type: str = MODEL
    prompt_type_path: str = ""
    max_prompt_length: NonNegative = 0  # tokens; 0 = any
    seq_length: NonNegative = 0  # tokens of prompt and reply together; 0 = any
    workers: Positive = 1  # threads that render and encode
    log_interval: Positive = 1000  # rows

    @property
    def inputs(self) -> list[tuple[str, str]]:
        """The paths, each with the key that names it."""
        if isinstance(self.input, str):
            return [(self.input, "input")]
        return [(path, f"input.{index}") for index, path in enumerate(self.input)]

    @property
    def row_format(self) -> RowFormat:
        keys = self.map_keys
        roles: tuple[Column, ...] = ("prompt", "query", "label", "system")
        named = zip(roles, (keys.prompt, keys.query, keys.response, keys.system), strict=True)
        columns = {role: column for role, column in named if column is not None}
        return RowFormat(handler=self.handler, columns=columns, system_prompt=self.system_prompt)

    @property
    def additional_keys(self) -> list[str]:
        """The columns to carry over, without the label."""
        return [name for name in self.dataset_additional_keys if name != LABELS]

    @property
    def output(self) -> Path:
        return Path(self.output_prefix if self.output_prefix.endswith(SUFFIX) else self.output_prefix + SUFFIX)


def load(path: Path, overrides: Sequence[str]) -> PrepareSettings:
    """Read and check a file of this schema. Raises ConfigError with one line for each fault."""
    settings = load_other(path, overrides, PrepareSettings, ADVICE)
    if faults := list(_faults(settings)):
        raise ConfigError(faults)
    return settings


def column_key(role: str) -> str:
    """Return the key that names the column of `role`, for messages."""
    return {"label": "map_keys.response", "difficulty": "difficulty_key"}.get(role, f"map_keys.{role}")


def _faults(settings: PrepareSettings) -> Iterator[str]:
    if not settings.inputs:
        yield "input: empty; name at least one file or folder"
    for path, key in settings.inputs:
        try:
            data_files(path, key)
        except UserError as error:
            yield str(error)
    if not Path(settings.tokenizer_name_or_path, "tokenizer.json").is_file():
        yield f"tokenizer_name_or_path: '{settings.tokenizer_name_or_path}' is not a folder with a tokenizer.json"
    name = settings.handler
    if name in _THEIR_HANDLERS:
        yield f"handler: '{name}' is called {_THEIR_HANDLERS[name]} here"
    elif OWN not in name and name not in HANDLERS:
        yield f"handler: '{name}' is not one of {', '.join(HANDLERS)}, nor FILE.py:NAME"
    yield from prompt_type_faults(settings.prompt_type, settings.prompt_type_path, "")
    if settings.seq_length and settings.max_prompt_length >= settings.seq_length:
        yield f"max_prompt_length: {settings.max_prompt_length} leaves no room for a reply in seq_length {settings.seq_length}"
    taken = (*COLUMNS, DIFFICULTY) if settings.difficulty_key else COLUMNS
    for index, name in enumerate(settings.additional_keys):
        if name in taken:
            yield f"dataset_additional_keys: '{name}' is a column of the output already"
        elif name in settings.additional_keys[:index]:
            yield f"dataset_additional_keys: '{name}' is there twice"


# ---- Overlap
# Problems that two sets have in common. Whitespace is ignored, because copies of a data set differ in it.

log = logging.getLogger("sluice")

_SHOWN_CHARACTERS = 60


def problem_key(question: str) -> int:
    """Return a hash that is equal for problems that differ in whitespace alone (up to 128-bit collisions)."""
    return xxhash.xxh3_128_intdigest("".join(question.split()).encode("utf-8", "surrogatepass"))


def overlap(train: Iterable[Problem], held_out: Iterable[Problem]) -> list[Problem]:
    """Return the problems of `held_out` that are in `train` too, in their order."""
    known = {problem_key(problem.question) for problem in train}
    return [problem for problem in held_out if problem_key(problem.question) in known]


def keep_apart(train: Sequence[Problem], held_out: Sequence[Problem], key: str, allowed: bool) -> None:
    """Check that no problem to train on is in the evaluation set of the configuration key `key`.

    Raises UserError with the number of shared problems; if `allowed`, log the number instead."""
    shared = overlap(train, held_out)
    if not shared:
        return
    first = " ".join(shared[0].question.split())
    shown = first if len(first) <= _SHOWN_CHARACTERS else f"{first[:_SHOWN_CHARACTERS]}…"
    found = f"{len(shared)} of the {len(held_out)} problems of {key} are in it too, first {shared[0].id} ({shown!r})"
    if not allowed:
        raise UserError(f"data.train: {found}; leave one of the files out, or set data.allow_overlap")
    log.warning("data.train: %s", found)


# ---- Preparation

CHUNK_ROWS = 256
AHEAD = 2  # chunks under way for each worker

Progress = Callable[[int], None]  # rows done


class Count(msgspec.Struct):
    """The counts of the rows of one source."""

    rows: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


class PreparedData(msgspec.Struct, kw_only=True):
    """The result of a preparation. `tokens` counts those of the prompts kept."""

    path: str
    sources: dict[str, Count]
    prompts: int
    rows: int
    tokens: int
    longest: int  # tokens
    seconds: float

    def report(self) -> list[str]:
        """Return lines for the terminal."""
        mean = self.tokens / self.prompts
        return [
            *(f"{name}: {report(each.rows, _by_count(each.dropped))}" for name, each in self.sources.items()),
            f"{self.path}: {self.prompts} prompts of {mean:.0f} tokens on average, {self.longest} at most",
            f"{self.rows} rows in {self.seconds:.1f} s: {self.rows / self.seconds:.0f} rows/s",
        ]


_Item = tuple[Problem, tuple[Any, ...]]  # with the values of the additional columns
_Encoded = list[tuple[_Item, str, np.ndarray]]  # with rendered text and its tokens


def prepare(settings: PrepareSettings, progress: Progress = lambda done: None) -> PreparedData:
    """Make the file of `settings`. Raises UserError for unusable rows, columns, tokenizers or disks."""
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
    with ThreadPoolExecutor(settings.workers, "prepare") as pool:
        under_way: deque[Future[_Encoded]] = deque()
        for chunk in work.chunks(progress):
            under_way.append(pool.submit(work.encode, chunk))
            if len(under_way) >= AHEAD * settings.workers:
                work.collect(under_way.popleft().result())
        for future in under_way:
            work.collect(future.result())
    return work.finish(began)


class _Work:
    """One preparation: the data shared by the threads, and the results so far."""

    def __init__(self, settings: PrepareSettings, tokenizer: Tokenizer):
        self._settings = settings
        self._additional = settings.additional_keys
        self._tokenizer = tokenizer
        self._reader = RowReader(settings.row_format, settings.difficulty_key)
        self._known: set[int] = set()
        self._sources: defaultdict[str, Count] = defaultdict(Count)
        self._tables: list[pa.Table] = []
        self._lengths: list[int] = []

    def chunks(self, report_done: Progress) -> Iterator[list[_Item]]:
        """Yield chunks of usable rows, in order. `report_done` is called every `log_interval` rows."""
        chunk: list[_Item] = []
        done = 0
        for path, key in self._settings.inputs:
            for found in source_rows(path, key):
                item = self._item(found)
                if item is not None:
                    chunk.append(item)
                done += 1
                if done % self._settings.log_interval == 0:
                    report_done(done)
                if len(chunk) == CHUNK_ROWS:
                    yield chunk
                    chunk = []
        if chunk:
            yield chunk
        if done % self._settings.log_interval:
            report_done(done)

    def _item(self, found: SourceRow) -> _Item | None:
        count = self._sources[found.source]
        count.rows += 1
        try:
            problem = self._reader.problem(found)
            known = problem_key(problem.question)
            if known in self._known:
                raise Rejected("duplicate problem")
        except Rejected as reason:
            count.dropped[str(reason)] += 1
            return None
        except MissingColumn as missing:
            raise no_column(column_key(missing.role), missing.column, found) from None
        self._known.add(known)
        for name in self._additional:
            if name not in found.row:
                raise no_column("dataset_additional_keys", name, found)
        return problem, tuple(found.row[name] for name in self._additional)

    def encode(self, chunk: list[_Item]) -> _Encoded:
        """Render and encode a chunk. Runs in a worker thread, and shares no mutable state."""
        texts = [self._tokenizer.template.render(problem.messages) for problem, _ in chunk]
        return list(zip(chunk, texts, self._tokenizer.encode_texts(texts), strict=True))

    def collect(self, encoded: _Encoded) -> None:
        """Add the prompts of a chunk that are not too long to the output. Call in the order of the rows."""
        import pyarrow as pa

        most, window = self._settings.max_prompt_length, self._settings.seq_length
        kept: _Encoded = []
        for item, text, ids in encoded:
            if most and len(ids) > most:
                self._sources[item[0].source].dropped[f"prompt over {most} tokens"] += 1
            elif window and len(ids) >= window:
                self._sources[item[0].source].dropped[f"no room for a reply in {window} tokens"] += 1
            else:
                kept.append((item, text, ids))
        problems = [problem for (problem, _), _, _ in kept]
        lengths = [len(ids) for _, _, ids in kept]
        self._lengths += lengths
        values = np.concatenate([np.empty(0, np.int32), *(ids for _, _, ids in kept)])
        offsets = np.cumsum([0, *lengths], dtype=np.int32)
        columns: dict[str, Any] = {
            "id": pa.array([problem.id for problem in problems], pa.string()),
            "source": pa.array([problem.source for problem in problems], pa.string()),
            "problem": pa.array([problem.question for problem in problems], pa.string()),
            "text": pa.array([text for _, text, _ in kept], pa.string()),
            "tokens": pa.ListArray.from_arrays(pa.array(offsets), pa.array(values)),
            "label": pa.array([problem.label for problem in problems], pa.string()),
        }
        if self._settings.difficulty_key:
            columns[prepared.DIFFICULTY] = pa.array([problem.difficulty for problem in problems], pa.float64())
        for index, name in enumerate(self._additional):
            columns[name] = _array(name, [extra[index] for (_, extra), _, _ in kept])
        self._tables.append(pa.table(columns))

    def finish(self, began: float) -> PreparedData:
        """Write the file. Raises UserError if no prompt is left, or the file cannot be written."""
        import pyarrow as pa

        dropped = _by_count(sum((each.dropped for each in self._sources.values()), Counter()))
        rows = sum(each.rows for each in self._sources.values())
        if not self._lengths:
            raise UserError(f"input: no prompt is left of {report(rows, dropped)}")
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
        with reading(f"output_prefix: {output}"):
            output.parent.mkdir(parents=True, exist_ok=True)
            prepared.write(output, table, info)
        return PreparedData(
            path=str(output),
            sources=self._sources,
            prompts=len(self._lengths),
            rows=rows,
            tokens=sum(self._lengths),
            longest=max(self._lengths),
            seconds=time.monotonic() - began,
        )


def _by_count(dropped: Mapping[str, int]) -> dict[str, int]:
    """Sort reasons by count, the largest first: their first occurrence depends on the number of workers."""
    return dict(sorted(dropped.items(), key=lambda item: (-item[1], item[0])))


def _array(name: str, values: list[Any]) -> pa.Array:
    import pyarrow as pa

    try:
        return pa.array(values)
    except pa.ArrowException as error:
        raise UserError(f"dataset_additional_keys: '{name}' holds values of several types: {error}") from error
