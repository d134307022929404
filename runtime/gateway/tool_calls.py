"""Tool calls in replies: one reader and one writer for all formats of `tool_formats.yaml`. Pure, on text."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from string import Formatter
from typing import Any, NamedTuple

import msgspec
import xxhash
from msgspec import Raw, Struct

from runtime.gateway.conversation import Message, Tool, ToolCall

INCOMPLETE = "\ufffd"  # a decoder writes it for bytes that are not, or not yet, UTF-8

_NAME, _KEY, _WORD = re.compile(r"[\w./-]+"), re.compile(r'[^<>"\n]+'), re.compile(r"\w+")
_KEYWORDS = re.compile(r"""(?:[^()"']|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')*""", re.DOTALL)
_TYPES: dict[str, Any] = {"integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict}


class _Call(Struct):
    name: str
    arguments: Raw = Raw(b"")
    parameters: Raw = Raw(b"")


class _NoCall(Exception):
    """The text at a position is not what the pattern says."""


class _Given(NamedTuple):
    """A reply's text, the schemas of the tools by name, the seed of ids, and whether the reply has ended."""

    text: str
    schemas: Mapping[str, Any]
    seed: str
    ended: bool


class Reading(NamedTuple):
    """The contents of a reply's text. `malformed`: a call begins in it that cannot be read and stays text."""

    content: str
    calls: tuple[ToolCall, ...]
    malformed: bool


class ToolFormat(Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """The way in which models of a family write tool calls. Patterns have fields: `{name}` of the tool; `{arguments}`, a JSON
    object; `{object}`, a JSON object of name and arguments under `keys`; `{keywords}`, as a call in Python has them;
    `{parameters}`, each as the pattern `parameter` says with `{key}` and `{value}`; `{index}`, the number of the call;
    `{word}`, which is only read. A value is text if the tool's schema allows text, else JSON. A reader takes other white space
    than a pattern has, except around `{value}`."""

    call: str = ""
    also: tuple[str, ...] = ()  # patterns of calls that models write too; they are only read
    section: tuple[str, str] = ("", "")  # around all calls of a reply
    between: str = ""
    parameter: str = ""
    keys: tuple[str, str] = ("name", "arguments")
    alone: bool = False  # a reply is either calls or text
    id: str = "call_{random:.24}"  # what a call's id looks like; `{random}`: 32 hexadecimal digits
    thinking: tuple[str, str] = ("<think>\n", "\n</think>\n\n")  # around the reasoning that begins a reply
    frames: tuple[str, ...] = ()  # texts around the content that are not part of the content

    # ---- Reading

    def read(self, text: str, tools: Sequence[Tool] = (), seed: str = "", ended: bool = True) -> Reading:
        """Return what a reply without its reasoning holds. Calls that cannot be read stay text. `tools`: their schemas give the
        types of values. `seed`: the ids of calls differ for different seeds. `ended`: the end of the text may close a call.
        Never raises."""
        texts, calls, malformed, at = [""], list[ToolCall](), False, 0  # `texts`: parted by calls
        given = _Given(text, {tool.name: tool.parameters for tool in tools}, seed, ended)
        while self._opening is not None and (opening := self._opening.search(text, at)):
            if self.alone and text[: opening.start()].strip():
                break
            found, end, whole = self._section(given, opening.start(), len(calls))
            if self.alone and not (whole and found and not text[end:].strip()):
                malformed = True
                break
            malformed |= not whole
            calls += found
            texts[-1] += text[at : opening.start() if found else opening.end()]
            texts += [""] if found else []
            at = end if found else opening.end()
        texts[-1] += text[at:]
        first, *others = map(self._without_frames, texts)
        content = "\n".join(filter(None, (first.rstrip(), *(other.strip() for other in others)))) if calls else first
        return Reading(content, tuple(calls), malformed)

    def _section(self, given: _Given, at: int, before: int) -> tuple[list[ToolCall], int, bool]:
        """Return the calls of the section at `at`, where they end, and whether the section is whole. The end of the text may
        stand for the section's end. `before`: the number of calls before."""
        calls, end, text = list[ToolCall](), at, given.text
        opens, closes = self.section
        try:
            at = _literal(_flexible(opens), text, at)
            while not calls or text[at:].strip():
                if calls and closes and (closed := _flexible(closes).match(text, at)):
                    return calls, closed.end(), True
                if calls:
                    at = _literal(_flexible(self.between), text, at)
                    if not closes and self._opening is not None and not self._opening.match(text, at):
                        return calls, end, True
                call, at = self._any(given, at, before + len(calls))
                calls.append(call)
                end = at
        except _NoCall:
            return calls, end, False
        return calls, end, True

    def _any(self, given: _Given, at: int, number: int) -> tuple[ToolCall, int]:
        """Return the call at `at` and where it ends. Raises _NoCall."""
        for pattern in self._patterns:
            try:
                return self._one(pattern, given, at, number)
            except _NoCall:
                continue
        raise _NoCall

    def _one(self, pattern: list[_Piece], given: _Given, at: int, number: int) -> tuple[ToolCall, int]:
        text, name, arguments, index = given.text, "", "{}", str(number)
        for place, piece in enumerate(pattern):
            if given.ended and place and not piece.field and not text[at:].strip():
                break
            at = _literal(piece.literal, text, at)
            if piece.field == "name":
                name, at = _matched(_NAME, text, at)
            elif piece.field in ("index", "word"):
                index, at = _matched(_WORD, text, at)
            elif piece.field == "arguments":
                written, at = _json(text, at)
                arguments = _arguments(written)
            elif piece.field == "object":
                name, arguments, at = _object(text, at)
            elif piece.field == "keywords":
                written, at = _matched(_KEYWORDS, text, at)
                arguments = _keywords(written)
            elif piece.field == "parameters":
                arguments, at = self._parameters(text, at, pattern[place + 1].literal, given.schemas.get(name) or {})
        if not name:
            raise _NoCall
        random = xxhash.xxh3_128_hexdigest(f"{given.seed} {number}".encode())
        return ToolCall(self.id.format(name=name, index=index, random=random), name, arguments), at

    def _parameters(self, text: str, at: int, behind: re.Pattern[str], schema: Mapping[str, Any]) -> tuple[str, int]:
        """Return the parameters at `at` as JSON, and where they end. `behind`: what follows them."""
        opens, splits, closes = self._parameter
        types = schema.get("properties") or {}
        found: dict[str, Any] = {}
        while opening := opens.match(text, at):
            key, at = _matched(_KEY, text, opening.end())
            at = _literal(splits, text, at)
            for close in closes.finditer(text, at):  # a value may hold what ends values
                if opens.match(text, close.end()) or behind.match(text, close.end()):
                    found[key], at = _typed(text[at : close.start()], types.get(key)), close.end()
                    break
            else:
                raise _NoCall
        return json.dumps(found, ensure_ascii=False), at

    def settled(self, text: str, tools: Sequence[Tool] = (), seed: str = "") -> Reading:
        """Return the part of what `read` returns that no further token changes. White space at the end is left out, as it is
        not part of the content before a call."""
        text, calls = text.rstrip(INCOMPLETE), tuple[ToolCall, ...]()
        if self.alone and text.lstrip()[:1] in ("", (self.section[0] or "{")[0]):
            text = ""
        elif self._opening is not None and not self.alone and (opening := self._opening.search(text)):
            # Clients join text behind a call by a newline, so no call is shown before the text that it stands in is settled.
            begins, _, _ = self._section(_Given(text, {}, seed, False), opening.start(), 0)
            calls = self.read(text, tools, seed, ended=False).calls if begins else ()
            text = text[: opening.start()]
        else:
            text = without_start_of((*self.frames, *self._openers), text)
        return Reading(self._without_frames(text).rstrip(), calls, False)

    def _without_frames(self, text: str) -> str:
        for frame in self.frames:
            text = text.replace(frame, "")
        return text

    def part_reasoning(self, text: str, opened: bool, ended: bool = True) -> tuple[str, str]:
        """Return the reasoning of a reply and the text behind it; if not `ended`, the part of both that no further token
        changes. `opened`: the prompt ends within the reasoning."""
        think, thought = (mark.strip() for mark in self.thinking)
        if not opened:
            before, opener, inner = text.partition(think)
            if not opener or before.strip():
                begins = not ended and think.startswith(text.rstrip(INCOMPLETE).strip())
                return "", "" if begins else text
            text = inner
        reasoning, closed, rest = text.partition(thought)
        if not (ended or closed):
            reasoning = without_start_of((thought,), reasoning.rstrip(INCOMPLETE))
        return reasoning.strip(), rest.lstrip("\n")

    # ---- Writing

    def write(self, message: Message) -> str:
        """Return an assistant's message in the format in which a model writes it."""
        reasoning = message.reasoning.join(self.thinking) if message.reasoning else ""
        content = self.frames[0] + message.content if self.frames and message.content else message.content
        calls = [self._written(call, number) for number, call in enumerate(message.tool_calls)]
        section = self.between.join(calls).join(self.section) if calls else ""
        gap = "\n" if content and section and not self.frames else ""
        return reasoning + content + gap + section

    def _written(self, call: ToolCall, number: int) -> str:
        fields = {"name": call.name, "index": number, "arguments": call.arguments}
        if "{object}" in self.call:
            name, arguments = self.keys
            fields["object"] = f'{{"{name}": {json.dumps(call.name, ensure_ascii=False)}, "{arguments}": {call.arguments}}}'
        elif "{arguments}" not in self.call:
            values = json.loads(call.arguments)
            fields["keywords"] = ", ".join(f"{key}={value!r}" for key, value in values.items())
            fields["parameters"] = "".join(self.parameter.format(key=key, value=_shown(values[key])) for key in values)
        return self.call.format(**fields)

    def begin(self, name: str) -> str:
        """Return the beginning of a reply that must call the tool `name` ("": any). It ends where a token of the model ends."""
        opens = self.section[0] + self.call.partition("{object}" if "{object}" in self.call else "{name}")[0]
        if "{object}" in self.call:
            key, arguments = self.keys
            return opens + f'{{"{key}": ' + (f'{json.dumps(name, ensure_ascii=False)}, "{arguments}":' if name else '"')
        behind = self.call.partition("{name}")[2].format(index=0, arguments="\0", keywords="\0", parameters="\0")
        return opens + (name + behind.partition("\0")[0] if name else "")

    def without_tools(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
        """Return the conversation for a chat template that knows no tools: the system message lists the tools and says how to
        call them, the assistant's content has its calls, and the user has their results."""
        example = self.write(Message("assistant", tool_calls=(ToolCall("", "function_name", '{"argument_name": "value"}'),)))
        listed = "\n".join(json.dumps(msgspec.structs.asdict(tool), ensure_ascii=False) for tool in tools)
        instructions = (
            f"You may call these functions:\n{listed}\nTo call a function, write this and nothing behind it:\n{example}"
        )
        found: list[Message] = []
        if tools:
            own = [message.content for message in messages[:1] if message.role == "system"]
            found, messages = [Message("system", "\n\n".join([*own, instructions]))], messages[len(own) :]
        results = False  # the newest message has results, and gets those that follow
        for message in messages:
            if message.role == "tool":
                before = [found.pop().content] if results else []
                text = f"<tool_response>\n{message.content}\n</tool_response>"
                found.append(Message("user", "\n".join([*before, text])))
            elif message.tool_calls:
                content = self.write(msgspec.structs.replace(message, reasoning=""))
                found.append(msgspec.structs.replace(message, content=content, tool_calls=()))
            else:
                found.append(message)
            results = message.role == "tool"
        return found

    # ---- Marks

    @cached_property
    def closing(self) -> str:
        """The text that ends each call; "" if only the syntax of the arguments ends a call."""
        words = self.call.rpartition("}")[2].split()
        return words[-1] if words and len(words[-1]) > 2 else ""

    def owns(self, token: str) -> bool:
        """Return whether the text of a token is part of the format. Such a token is read although it is special."""
        token = token.strip()
        texts = (*self.section, self.call, *self.also, *self.thinking, *self.frames)
        return bool(token) and any(token in text for text in texts)

    @cached_property
    def _openers(self) -> list[str]:
        """The texts at which calls begin, up to their first field or white space."""
        patterns = [self.section[0]] if self.section[0] else [self.call, *self.also]
        return [pattern.partition("{")[0] for pattern in patterns]

    @cached_property
    def _opening(self) -> re.Pattern[str] | None:
        """The beginnings of calls in a text. Formats without marks are known by the beginning of a call."""
        if not self.call:
            return None
        if self.alone:
            call = r"\{\s*\"name\"\s*:" if "{object}" in self.call else r"[\w./-]+\("
            return re.compile(_flexible(self.section[0]).pattern + r"\s*" + call)
        return re.compile("|".join(_flexible(opener).pattern for opener in self._openers))

    @cached_property
    def _patterns(self) -> list[list[_Piece]]:
        return [_pieces(pattern) for pattern in (self.call, *self.also)]

    @cached_property
    def _parameter(self) -> tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str]]:
        """The patterns that open a parameter, separate key and value, and close it."""
        opens, _, rest = self.parameter.partition("{key}")
        splits, _, closes = rest.partition("{value}")
        space = closes[: len(closes) - len(closes.lstrip())]
        head = splits.rstrip()
        return (
            re.compile(r"\s*" + _flexible(opens).pattern),
            re.compile(_flexible(head).pattern + _maybe(splits[len(head) :])),
            re.compile(_maybe(space) + _flexible(closes.lstrip()).pattern),
        )


class _Piece(NamedTuple):
    literal: re.Pattern[str]
    field: str  # behind the literal; "": none


_SPACE = re.compile(r"\s*")


def _pieces(pattern: str) -> list[_Piece]:
    return [_Piece(_flexible(literal), field or "") for literal, field, *_ in Formatter().parse(pattern)]


def _flexible(literal: str) -> re.Pattern[str]:
    """Return a pattern that matches the text with other white space."""
    return re.compile(r"\s*".join(re.escape(part) for part in re.split(r"\s+", literal)))


def _maybe(space: str) -> str:
    return f"(?:{re.escape(space)})?" if space else ""


def _literal(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Return where the pattern ends that begins at `at`. Raises _NoCall."""
    return _matched(pattern, text, at)[1] if pattern.pattern else at


def _matched(pattern: re.Pattern[str], text: str, at: int) -> tuple[str, int]:
    if (found := pattern.match(text, at)) is None:
        raise _NoCall
    return found[0], found.end()


def _json(text: str, at: int) -> tuple[str, int]:
    """Return the JSON at `at` as it is written, and where it ends. Raises _NoCall."""
    at = _SPACE.match(text, at).end()  # type: ignore[union-attr]  # matches anything
    try:
        _, end = json.JSONDecoder().raw_decode(text, at)
    except (ValueError, RecursionError):
        raise _NoCall from None
    return text[at:end], end


def _object(text: str, at: int) -> tuple[str, str, int]:
    """Return the name and the arguments of an object, and where it ends. Raises _NoCall."""
    written, end = _json(text, at)
    try:
        found = msgspec.json.decode(written, type=_Call)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        raise _NoCall from None
    return found.name, _arguments((bytes(found.arguments) or bytes(found.parameters) or b"{}").decode()), end


def _arguments(written: str) -> str:
    """Return arguments, which must be a JSON object. Some models quote them, as OpenAI's API does. Raises _NoCall."""
    try:
        if written.startswith('"'):
            written = msgspec.json.decode(written, type=str)
        msgspec.json.decode(written, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        raise _NoCall from None
    return written


class _Constants(ast.NodeTransformer):
    """JSON's constants as Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        known = {"true": True, "false": False, "null": None}
        return ast.Constant(known[node.id]) if node.id in known else node


def _keywords(written: str) -> str:
    """Return keyword arguments of Python as JSON. Raises _NoCall unless all values are constants."""
    try:
        call = _Constants().visit(ast.parse(f"f({written})", mode="eval")).body
        if not isinstance(call, ast.Call) or call.args or not all(each.arg for each in call.keywords):
            raise _NoCall
        values = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
        return json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise _NoCall from None


def _typed(written: str, schema: Any) -> Any:
    """Return a value of the types that the schema allows: text if no other is allowed or fits. Chat templates also write
    numbers and truth values as Python does."""
    allowed = _allowed(schema)
    if allowed == {"string"}:
        return written
    for parse in (json.loads, ast.literal_eval):
        try:
            value = parse(written.strip())
            json.dumps(value, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
        fits = not allowed or any(isinstance(value, _TYPES.get(kind, str)) for kind in allowed) or value is None
        if fits and not isinstance(value, str | tuple):
            return value
    return written


def _allowed(schema: Any) -> set[str]:
    """Return the types that a JSON schema names; empty: all."""
    if not isinstance(schema, Mapping):
        return set()
    given = schema.get("type")
    if given is not None:
        return {given} if isinstance(given, str) else set(given)
    if values := schema.get("enum"):
        return {"string"} if all(isinstance(value, str) for value in values) else set()
    parts = [_allowed(part) for key in ("anyOf", "oneOf") for part in schema.get(key) or ()]
    return set().union(*parts) if all(parts) else set()


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def without_start_of(marks: Sequence[str], text: str) -> str:
    """Return the text without an end that may begin one of `marks`."""
    started = max((size for mark in marks for size in range(1, len(mark)) if text.endswith(mark[:size])), default=0)
    return text[: len(text) - started]


FORMATS: dict[str, ToolFormat] = msgspec.yaml.decode(
    Path(__file__).with_name("tool_formats.yaml").read_bytes(), type=dict[str, ToolFormat]
)
NO_CALLS = ToolFormat()
