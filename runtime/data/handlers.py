"""From rows of a file to problems: a handler reads one row format.

A handler is `handler(fields) -> (messages, label)`, registered with the columns of its format. It raises `Rejected` for an
unusable row (dropped and counted by reason) and `MissingColumn` for a missing column (an error of the configuration)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from math import isfinite, isnan
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import xxhash
from msgspec.structs import replace

from runtime import config
from runtime.data.reading import Row, data_files, read_rows
from runtime.errors import UserError
from runtime.registry import Registry
from runtime.rewards.extraction import last_boxed
from runtime.run_files import NOT_DECODED, reading

# ---- Prompt types
# Named templates: the text around system text, problem and replies, as data in a JSON file.
#
# The file is a list of objects in the format of LLaMA-Factory and MindSpeed-RL. A part's `slots` are strings with
# `{{content}}` for the text, or name a special token (`["bos_token"]`, `{"token": "<x>"}`). The parts of a prompt and the
# ends of a reply are read; keys about tools and the padding of supervised training are not.

MODEL = "model"  # the prompt type that is the model's own chat template
BUILT_IN = Path(__file__).parent / "templates.json"  # configs/templates.json of the source tree

Slot = str | list[str] | dict[str, str]


class PromptPart(msgspec.Struct, frozen=True):
    """The text written for one message."""

    slots: list[Slot]


class PromptType(msgspec.Struct, frozen=True):
    """One object of the file. A missing part is the text alone, with the end-of-sequence token behind a reply."""

    name: str
    format_user: PromptPart | None = None
    format_assistant: PromptPart | None = None
    format_system: PromptPart | None = None
    format_separator: PromptPart | None = None  # before every user's message but the first
    format_prefix: PromptPart | None = None  # once, before everything
    default_system: str | list[str] = ""
    stop_words: list[str] = []  # tokens that end a reply, beside the model's own
    efficient_eos: bool = False  # no end-of-sequence token after a reply


class SlotTemplate:
    """A prompt type with the model's special tokens; renders what `ChatTemplate` renders."""

    def __init__(self, prompt_type: PromptType, special_tokens: Mapping[str, str], origin: str):
        """Take `origin` as the template's name in errors. Raises UserError if a part has no `{{content}}`."""
        text: list[Slot] = ["{{content}}"]
        eos: list[Slot] = [] if prompt_type.efficient_eos else [["eos_token"]]
        missing: dict[str, list[Slot]] = {
            "user": text,
            "assistant": [*text, *eos],
            "system": text,
            "separator": [],
            "prefix": [],
        }
        parts = {name: getattr(prompt_type, f"format_{name}") for name in missing}
        self._slots: dict[str, list[Slot]] = {name: part.slots if part else missing[name] for name, part in parts.items()}
        self.origin = origin
        self._special_tokens = dict(special_tokens)
        self._default_system = "".join(prompt_type.default_system)
        # Llama 2 takes the system text into the first message: by the name, as in the other programs that read this format.
        self._system_in_user = prompt_type.name.startswith("llama2")
        self.stop_words = tuple(prompt_type.stop_words)
        for part in ("user", "assistant", "system"):
            if not any(isinstance(slot, str) and "{{content}}" in slot for slot in self._slots[part]):
                raise UserError(f"{origin}: format_{part} has no {{{{content}}}}")

    @property
    def identity(self) -> str:
        """A hash, equal for templates that render every conversation alike."""
        rest = (self._default_system, self._system_in_user, self._special_tokens)
        return xxhash.xxh3_64_hexdigest(msgspec.json.encode((list(self._slots.values()), rest), order="sorted"))

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the conversation as text, ready for a reply if it ends with the user. Raises UserError for other roles."""
        system, turns = self._default_system, list(messages)
        if turns and turns[0]["role"] == "system":
            system = turns.pop(0)["content"] or system
        before = self._fill("system", system) if system else ""
        text = self._fill("prefix") + ("" if self._system_in_user else before)
        for index, turn in enumerate(turns):
            role, content = turn["role"], turn["content"]
            if role == "user":
                if index:
                    text += self._fill("separator")
                elif self._system_in_user:
                    content = before + content
                text += self._fill("user", content, index // 2)
            elif role == "assistant":
                text += self._fill("assistant", content)
            else:
                raise UserError(f"{self.origin}: cannot render a message of role {role!r} here")
        return text

    def _fill(self, part: str, content: str = "", turn: int = 0) -> str:
        return "".join(self._slot(slot, content, turn) for slot in self._slots[part])

    def _slot(self, slot: Slot, content: str, turn: int) -> str:
        if isinstance(slot, str):
            return slot.replace("{{idx}}", str(turn)).replace("{{content}}", content)
        if isinstance(slot, dict):
            return slot.get("token", "")
        return "".join(self._special_tokens.get(name, "") for name in slot)  # a token that the model lacks is left out


def slot_template(name: str, path: str, special_tokens: Mapping[str, str], section: str = "data.") -> SlotTemplate:
    """Return the template `name` of the file `path`, if it is there, else of Sluice's own file.

    `section` is the prefix of keys in errors. Raises UserError for an unknown name and an unusable file."""
    if faults := list(prompt_type_faults(name, path, section)):
        raise UserError(faults[0])
    found = _known(path, section)
    return SlotTemplate(found[name], special_tokens, f"{section}prompt_type: {name}")


def prompt_type_faults(name: str, path: str, section: str = "data.") -> Iterator[str]:
    """Yield a line for an unknown name, or for an unusable file `path`."""
    try:
        if name not in (known := [MODEL, *sorted(_known(path, section))]):
            yield f"{section}prompt_type: '{name}' is not one of {', '.join(known)}"
    except UserError as error:
        yield str(error)


def _known(path: str, section: str) -> dict[str, PromptType]:
    return _read(BUILT_IN, section) | (_read(Path(path), section) if path else {})


def _read(path: Path, section: str) -> dict[str, PromptType]:
    where = f"{section}prompt_type_path: {path}"
    try:
        with reading(where):
            listed = msgspec.json.decode(path.read_bytes(), type=list[PromptType])
    except NOT_DECODED as error:
        raise UserError(f"{where}: not a list of templates: {error}") from error
    return {prompt_type.name: prompt_type for prompt_type in listed}


# ---- Fields
# One row of a file as a handler reads it: prompt, label and system text, by the configured columns.

Messages = list[dict[str, str]]

ROLES = ("system", "user", "assistant")
_SHAREGPT = {"human": "user", "gpt": "assistant", "system": "system"}  # by "from", with the text as "value"
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_encode = msgspec.json.Encoder(decimal_format="number").encode


class Rejected(Exception):
    """A row that is left out; the message is the reason under which it is counted."""


class MissingColumn(Exception):
    """A row without the column of `role`: prompt, query, label, system, difficulty, environment or additional."""

    def __init__(self, role: str, column: str):
        super().__init__(role, column)
        self.role, self.column = role, column


class FieldColumns(msgspec.Struct, frozen=True, kw_only=True):
    """The column of each role; "" for none. The columns of roles in `optional` may be missing from a row."""

    prompt: str
    label: str
    query: str = ""
    system: str = ""
    optional: tuple[str, ...] = ()


class Fields:
    """A row with its columns. The methods raise Rejected for an unusable value, MissingColumn for a missing column."""

    def __init__(self, row: Row, columns: FieldColumns, system_prompt: str = ""):
        self.row = row
        self._columns = columns
        self._system_prompt = system_prompt

    def value(self, role: str) -> Any:
        """Return the value in the column of `role`; None if the format has no such column."""
        column = getattr(self._columns, role)
        if not column or (role in self._columns.optional and column not in self.row):
            return None
        return _column(self.row, role, column)

    def named(self, role: str) -> bool:
        """Return whether the format has a column of `role`."""
        return bool(getattr(self._columns, role))

    def has(self, role: str) -> bool:
        """Return whether the row has the column of `role`."""
        return getattr(self._columns, role) in self.row

    def conversation(self) -> Messages:
        """Return the prompt as messages, the system text first. A text has the query in a line of its own below."""
        prompt, query = _chat_if_any(self.value("prompt")), self.value("query")
        if isinstance(prompt, list):
            messages = _turns(prompt)
            if messages[-1]["role"] != "user":
                raise Rejected("chat that does not end with the user")
        elif prompt is None or isinstance(prompt, str):
            parts = [prompt or "", query if isinstance(query, str) else ""]
            messages = [{"role": "user", "content": "\n".join(part for part in parts if part)}]
        else:
            raise Rejected("prompt that is not text")
        if not messages[-1]["content"].strip():
            raise Rejected("empty prompt")
        return self._with_system(messages)

    def _with_system(self, messages: Messages) -> Messages:
        system = self.value("system")
        if system is not None and not isinstance(system, str):
            raise Rejected("system text that is not text")
        system = system or self._system_prompt
        return messages if not system or messages[0]["role"] == "system" else [{"role": "system", "content": system}, *messages]

    def chat(self) -> Messages:
        """Return the prompt as messages, the system text first. Any role may have the last message."""
        prompt = _chat_if_any(self.value("prompt"))
        if not isinstance(prompt, list):
            raise Rejected("prompt that is not a chat")
        return self._with_system(_turns(prompt))

    def label(self) -> str:
        """Return the label as text, without the point of a whole float: contest files write 142 as 142.0."""
        return label_text(self.value("label"))


def extra(row: Row, names: Sequence[str]) -> dict[str, Any]:
    """Return the columns `names` as JSON values: dates are text, bytes base64, NaN null. Raises MissingColumn, Rejected."""
    values = {name: _column(row, "additional", name) for name in names}
    found: dict[str, Any] = msgspec.json.decode(_json(values, "additional column that is no JSON value"))
    return found


def _column(row: Row, role: str, column: str) -> Any:
    if column not in row:
        raise MissingColumn(role, column)
    return row[column]


def _json(value: Any, fault: str) -> str:
    try:
        return _encode(value).decode()
    except (TypeError, ValueError, RecursionError):
        raise Rejected(fault) from None


def label_text(value: Any) -> str:
    """Return a label as text: a whole number without a point (142.0 as 142), a mapping or a list of mappings (such as tests of
    programs) as JSON. Raises Rejected for a null or empty label and for other types."""
    if value is None:
        raise Rejected("null label")
    if isinstance(value, dict) or (isinstance(value, list) and value and all(isinstance(each, dict) for each in value)):
        return _json(value, "label that is no JSON value")
    if isinstance(value, bool) or not isinstance(value, (str, int, float, Decimal)):
        raise Rejected("label that is neither text nor a number")
    if isinstance(value, (float, Decimal)):
        if isnan(value):
            raise Rejected("null label")  # as pandas writes one
        value = int(value) if isfinite(value) and value == int(value) else value
    text = (format(value, "f") if isinstance(value, Decimal) else str(value)).strip()
    if not text:
        raise Rejected("empty label")
    return text


def difficulty(row: Row, column: str) -> float:
    """Return the difficulty of a row's problem, above 0: a number, or the number in a text ("Level 3").

    Raises Rejected for 0, which files write for unknown, and MissingColumn for a missing column."""
    value = _column(row, "difficulty", column)
    if isinstance(value, str):
        found = _NUMBER.search(value)
        value = float(found.group()) if found else None
    if isinstance(value, bool) or not isinstance(value, (int, float, Decimal)) or not isfinite(value) or value <= 0:
        raise Rejected("unknown difficulty")
    return float(value)


def _chat_if_any(prompt: Any) -> Any:
    """Return the chat that a text holds as JSON, as in tables with a column of texts; return any other prompt unchanged."""
    if not isinstance(prompt, str) or not prompt.lstrip().startswith("[{"):
        return prompt
    try:
        turns = msgspec.json.decode(prompt, type=list[dict[str, Any]])
    except (msgspec.DecodeError, RecursionError):
        return prompt
    return turns if all({"role", "content"} <= turn.keys() or {"from", "value"} <= turn.keys() for turn in turns) else prompt


def _turns(turns: list[Any]) -> Messages:
    messages: Messages = []
    for turn in turns:
        if not isinstance(turn, dict):
            raise Rejected("prompt that is not text")
        role, content = turn.get("role"), turn.get("content")
        if role is None:
            role, content = _SHAREGPT.get(str(turn.get("from"))), turn.get("value")
        if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            content = "\n".join(str(part.get("text")) for part in content)
        if role not in ROLES or not isinstance(content, str):
            raise Rejected("prompt that is not text")
        messages.append({"role": role, "content": content})
    if not messages:
        raise Rejected("empty prompt")
    return messages


# ---- Handlers

Read = Callable[[Fields], tuple[Messages, str]]

_CALCULATOR = re.compile(r"<<[^<>]*>>")


class Handler(msgspec.Struct, frozen=True):
    """The reader of a row format, and its columns where the configuration names none."""

    read: Read
    columns: FieldColumns


HANDLERS: Registry[Handler] = Registry("data.handler")


def handler(name: str, columns: FieldColumns) -> Callable[[Read], Read]:
    """Register a function of a row's Fields as the handler `name`. The function returns the prompt, as messages, and the label,
    as text; a row is left out if it raises Rejected. `columns` hold if the configuration names none."""
    return HANDLERS.register_made(name, lambda read: Handler(read, columns))


class Problem(msgspec.Struct, frozen=True):
    """One prompt with its label. `id` is unique in a file and the same in every run: "gsm8k/train:17"."""

    id: str
    messages: Messages
    label: str
    source: str  # the file's folder and stem: "gsm8k/train"
    difficulty: float = 0.0  # 0 if no difficulty was asked for
    extra: dict[str, Any] = {}  # the columns of `additional_keys`, as JSON values; all columns if an agent plays it
    environment: str = ""  # whose agent plays it; "": no agent
    reference: str = ""  # its reference model; "": the reference of the run

    @property
    def question(self) -> str:
        """What the user says last; the whole row of a task without a conversation."""
        if not self.messages:
            return msgspec.json.encode(self.extra).decode()
        return next(message["content"] for message in reversed(self.messages) if message["role"] == "user")


class ProblemSet(msgspec.Struct, kw_only=True):
    """The problems of one file, in its order, and the rows left out, counted by reason."""

    problems: list[Problem]
    rows: int
    dropped: dict[str, int] = {}

    def report(self) -> str:
        """Return one line for the log."""
        return report(self.rows, self.dropped)


def report(rows: int, dropped: Mapping[str, int]) -> str:
    """Return the counts of rows in words: "7474 rows, 7472 problems (dropped: 2 null label)"."""
    reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
    return f"{rows} rows, {rows - sum(dropped.values())} problems" + (f" (dropped: {reasons})" if reasons else "")


class SourceRow(NamedTuple):
    """A row with its `position` in its source, over all files of a folder; `where` names the row in messages."""

    source: str
    position: int
    where: str
    row: Row


def no_column(key: str, column: str, found: SourceRow) -> UserError:
    """Return the error for a row without a column that `key` names."""
    return UserError(f"{key}: {found.where} has no column {column!r} (its columns: {', '.join(sorted(found.row))})")


class RowReader:
    """Makes a problem of each row."""

    def __init__(self, row_format: config.RowFormat, difficulty_key: str):
        """Find the handler. Raises UserError for an unknown one."""
        self._handler = HANDLERS.find(row_format.handler)
        named = {str(role): column for role, column in row_format.columns.items() if role != "environment"}
        # The handler's own query and system columns may be missing.
        self._columns = replace(self._handler.columns, **named, optional=tuple({"query", "system"} - named.keys()))
        self._system_prompt = row_format.system_prompt
        self._additional = row_format.additional_keys
        self._difficulty_key = difficulty_key
        self._environment, self._environment_key = row_format.environment, row_format.columns.get("environment", "")

    def problem(self, found: SourceRow) -> Problem:
        """Return the problem of a row. Raises Rejected, and MissingColumn."""
        messages, label = self._handler.read(Fields(found.row, self._columns, self._system_prompt))
        hard = difficulty(found.row, self._difficulty_key) if self._difficulty_key else 0.0
        environment = environment_of(found.row, self._environment, self._environment_key)
        more = extra(found.row, list(found.row) if environment else self._additional)
        return Problem(f"{found.source}:{found.position}", messages, label, found.source, hard, more, environment)


def environment_of(row: Row, environment: str, key: str) -> str:
    """Return the name in the column `key`, or `environment` if `key` is empty. Raises MissingColumn, Rejected."""
    if not key:
        return environment
    name = _column(row, "environment", key)
    if not isinstance(name, str) or not name:
        raise Rejected("row that names no environment")
    return name


def column_key(key: str, role: str) -> str:
    """Return the key that names the column of `role`, for the file at the configuration key `key`."""
    if role == "difficulty":
        return "data.curriculum.key"
    section = key.rpartition(".")[0] if key.count(".") > 1 else "data"
    return f"{section}.additional_keys" if role == "additional" else f"{section}.columns.{role}"


def load_problems(path: str, row_format: config.RowFormat, key: str = "data.train", difficulty_key: str = "") -> ProblemSet:
    """Read the file or folder `path` with the handler `row_format.handler`. `key` is the configuration key of the path.

    Raises UserError for an unknown handler, an unusable file, a missing column, and a file without a usable row."""
    reader = RowReader(row_format, difficulty_key)
    problems: list[Problem] = []
    dropped: Counter[str] = Counter()
    for found in source_rows(path, key):
        try:
            problems.append(reader.problem(found))
        except Rejected as reason:
            dropped[str(reason)] += 1
        except MissingColumn as missing:
            raise no_column(column_key(key, missing.role), missing.column, found) from None
    rows = len(problems) + sum(dropped.values())
    if not problems:
        raise UserError(f"{key}: {path}: no row is left of {report(rows, dropped)}")
    return ProblemSet(problems=problems, rows=rows, dropped=dict(dropped))


def source_rows(path: str, key: str) -> Iterator[SourceRow]:
    """Yield each row of the file or folder `path`. Raises UserError, with `key`, for a missing, empty or malformed file."""
    source, files = data_files(path, key)
    before = position = 0
    for file in files:
        for place, row in read_rows(file, key):
            position = before + place
            yield SourceRow(source, position, f"{file}:{place}", row)
        before = position


@handler("plain", FieldColumns(prompt="question", label="answer"))
def plain(fields: Fields) -> tuple[Messages, str]:
    """Return prompt and label as they are. The label is text or a number, or "" if its column is ""."""
    return fields.conversation(), fields.label() if fields.named("label") else ""


@handler("task", FieldColumns(prompt="messages", label="label"))
def task(fields: Fields) -> tuple[Messages, str]:
    """Return conversation and label of an agent's task, if the row has them; the agent gets the whole row."""
    messages = fields.conversation() if fields.has("prompt") else []
    return messages, fields.label() if fields.has("label") else ""


@handler("messages", FieldColumns(prompt="messages", label=""))
def messages(fields: Fields) -> tuple[Messages, str]:
    """Read a conversation that ends with the assistant; the last message is the label."""
    *before, last = fields.chat()
    if last["role"] != "assistant" or not before or before[-1]["role"] != "user":
        raise Rejected("chat that does not end with a reply to the user")
    return before, label_text(last["content"])


@handler("gsm8k", FieldColumns(prompt="question", label="answer"))
def gsm8k(fields: Fields) -> tuple[Messages, str]:
    """Read GSM8K as published: the label is the number after the last `####`, without thousands commas."""
    _, mark, answer = _CALCULATOR.sub("", fields.label()).rpartition("####")
    if not mark:
        raise Rejected("label without ####")
    return fields.conversation(), label_text(answer.replace(",", ""))


@handler("alpaca", FieldColumns(prompt="instruction", query="input", label="output"))
def alpaca(fields: Fields) -> tuple[Messages, str]:
    """Read Alpaca's format: the instruction, with its input below if there is one; the label is the output."""
    return fields.conversation(), fields.label()


@handler("r1", FieldColumns(prompt="problem", label="answer"))
def r1(fields: Fields) -> tuple[Messages, str]:
    """Read a problem with its final answer. The label is the first of a list of accepted answers."""
    answer = fields.value("label")
    if isinstance(answer, list):
        answer = answer[0] if answer else ""
    return fields.conversation(), label_text(answer)


@handler("math", FieldColumns(prompt="problem", label="solution"))
def math(fields: Fields) -> tuple[Messages, str]:
    r"""Read MATH as published: the label is the content of the solution's last `\boxed{}`."""
    answer = last_boxed(fields.label())
    if answer is None:
        raise Rejected("label without \\boxed{}")
    return fields.conversation(), label_text(answer)


@handler("math17k", FieldColumns(prompt="prompt", label="reward_model"))
def math17k(fields: Fields) -> tuple[Messages, str]:
    """Read DAPO-Math-17k's format: the prompt is a chat, the label is `ground_truth` in the column `reward_model`."""
    verdict = fields.value("label")
    if not isinstance(verdict, dict):
        raise Rejected("null label" if verdict is None else "label without ground_truth")
    return fields.conversation(), label_text(verdict.get("ground_truth"))
