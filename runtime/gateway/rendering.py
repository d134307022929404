"""Conversations as tokens and replies as messages, by the model's chat template or by its family.

A prompt that continues a reply is never rendered anew: the model's tokens stay, and the new messages are put behind them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct, structs

from runtime.data.handlers import SlotTemplate
from runtime.data.tokenizer import Tokenizer
from runtime.errors import UserError
from runtime.gateway.conversation import Message, Refused, Tool, ToolCall
from runtime.gateway.tool_calls import FORMATS, NO_CALLS
from runtime.run_files import read_object

# ---- Conversations that test chat templates: tools, thinking, system prompts, parallel calls, Unicode, empty and long ones

_NUMBER, _QUERY = {"type": "number"}, {"type": "string", "description": "Of what."}
_PROBE_TOOLS = (
    Tool("add", "Adds two numbers.", {"type": "object", "properties": {"a": _NUMBER, "b": _NUMBER}, "required": ["a", "b"]}),
    Tool("look_up", "Finds a fact.", {"type": "object", "properties": {"query": _QUERY}}),
)


class ProbeConversation(Struct, frozen=True):
    """A conversation that begins with a question and ends with a reply."""

    name: str
    with_tools: bool
    messages: tuple[Message, ...]

    @property
    def tools(self) -> tuple[Tool, ...]:
        return _PROBE_TOOLS if self.with_tools else ()


@lru_cache(maxsize=1)
def conversations() -> list[ProbeConversation]:
    """Return the forty conversations of `conversations.jsonl`."""
    lines = Path(__file__).with_name("conversations.jsonl").read_bytes()
    return msgspec.json.Decoder(ProbeConversation).decode_lines(lines)


# ---- Template rendering


class TemplateRenderer:
    """Renders by the model's chat template, and continues by the difference of two renderings. Methods may run in threads.
    `stop_ids`: tokens that end a reply. `decodes_parts`: parts of a conversation decode to the text of the whole."""

    def __init__(self, tokenizer: Tokenizer, tools: str = "auto"):
        """Learn the template's format. `tools`: the name of a format of calls, or "none"; "auto": the template's format."""
        self.tokenizer = tokenizer
        self.template = tokenizer.template
        self._parses_arguments = True  # the template takes arguments as an object, else as JSON text
        self._writes_tools = False  # the template knows no tools, and messages have them in their texts
        self._close, self._close_id = self._closing()
        found, self._lists_tools = self._tools_of_template()
        self.format_name = found if tools == "auto" else tools
        self.form = FORMATS.get(self.format_name, NO_CALLS)
        self.takes_tools = self.form is not NO_CALLS and (self._lists_tools or tools != "auto")
        self._writes_tools = self.takes_tools and not self._lists_tools
        self._plain = structs.replace(NO_CALLS, thinking=self.form.thinking, frames=self.form.frames)
        self._think, self._thought = self.form.thinking
        closing = () if self._close_id is None else (self._close_id,)
        self.stop_ids = tuple(sorted({*tokenizer.stop_ids, *closing}))
        think = self._think.strip()
        self._opened = self._text_if_any(_ANSWERED[:1], ()).rstrip().endswith(think)
        self.thinks = self._opened or think in tokenizer.vocabulary or think in getattr(self.template, "source", "")
        special = {
            id: tokenizer.decode([id], skip_special=False) for id in (*tokenizer.texts.hidden_ids.tolist(), *self.stop_ids)
        }
        self._hidden = {id for id, text in special.items() if not self.form.owns(text)}
        # The tokens that end replies in the template: its own, and those that end calls, as gpt-oss has one.
        self._closes = {id: special[id] for id in self.stop_ids if id == self._close_id or id not in self._hidden}
        self.decodes_parts = True
        self._no_bridge = self._bridge_fault()

    def encode(self, text: str) -> list[int]:
        """Return the tokens of the text. Raises Refused if the text cannot be encoded."""
        try:
            return self.tokenizer.encode_texts([text])[0].tolist()
        except UserError as error:
            raise Refused(400, str(error)) from error

    def decode(self, tokens: Sequence[int] | np.ndarray, last: Sequence[int] | np.ndarray = ()) -> str:
        """Return the text of the tokens behind the token `last`, special tokens included."""
        if not len(last):
            return self.tokenizer.decode(tokens, skip_special=False)
        text = self.tokenizer.decode(np.concatenate([last, tokens]), skip_special=False)
        return text[len(self.tokenizer.decode(last, skip_special=False)) :]

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Return the conversation up to where the reply begins. Raises Refused if the template cannot render it."""
        if tools and not self.takes_tools:
            why = "takes no tools" if not self._lists_tools else "writes tool calls in an unknown format"
            raise Refused(400, f"tools: the model's chat template {why}; gateway.tool_format names a format", "tools")
        if not self.takes_tools and any(message.tool_calls for message in messages):
            raise Refused(400, "messages: tool calls, which the model's chat template does not support", "messages")
        try:
            return self.encode(self.text(messages, tools))
        except UserError as error:
            raise Refused(400, f"messages: {error}", "messages") from error

    def text(self, messages: Sequence[Message], tools: Sequence[Tool], generate: bool = True) -> str:
        """Return the conversation as text; `generate`: up to where a reply begins. Raises UserError if it cannot."""
        if self._writes_tools:
            messages, tools = self.form.without_tools(messages, tools), ()
        shaped = [as_openai(message, self._parses_arguments) for message in messages]
        if isinstance(self.template, SlotTemplate):
            return self.template.render(shaped)
        return self.template.render(shaped, generate, functions(tools))

    def bridge(
        self,
        tokens: np.ndarray,
        reply: int,
        history: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[Tool],
        said: Callable[[], str],
    ) -> list[int] | str:
        """Return the tokens to put behind `tokens` (int32) so that the model answers the messages `new`. Return a reason if it
        cannot be proved that this continues the conversation as rendered. `tokens` end with the `reply` tokens of the last
        message of `history`. `said`: returns the text of `tokens`."""
        if (known := self.family_bridge(tokens, reply, new, tools)) is not None:
            return known
        if self._no_bridge:
            return self._no_bridge
        last, ended = history[-1], self.ends(tokens)
        if not ended and last.reasoning and not last.content and not last.tool_calls:
            return "the reply was cut off while it reasoned"
        if self._close_id is None:
            return self._next_message(tokens, history, new, tools)
        close = self._closes.get(int(tokens[-1]), "") if ended else self._close
        if not close:
            return f"the reply ended with {self.decode(tokens[-1:])}, not {self._close}"
        try:
            tail = self._tail(said() if ended else said() + close, close, history, new, tools)
        except UserError as error:
            return str(error)
        added = self.encode(close + tail)
        return added[1:] if ended else added

    def _next_message(
        self, tokens: np.ndarray, history: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool]
    ) -> list[int] | str:
        """Return the tokens to add, or a reason, as `bridge`. The token that ends a reply is the first of the next message."""
        try:
            answered, after = self.text(history, tools, generate=False), self.text([*history, *new], tools)
        except UserError as error:
            return str(error)
        if not after.startswith(answered):
            return _RENDERED_DIFFERENTLY
        added = self.encode(after[len(answered) :])
        if not self.ends(tokens):
            return added
        return added[1:] if added[:1] == [int(tokens[-1])] else f"the reply ended with {self.decode(tokens[-1:])}"

    def ends(self, tokens: np.ndarray) -> bool:
        """Return True if the last token ends a reply."""
        return int(tokens[-1]) in self.stop_ids

    def family_bridge(self, tokens: np.ndarray, reply: int, new: Sequence[Message], tools: Sequence[Tool]) -> list[int] | None:
        """Return the tokens to add, as `bridge`; None if the model's family is unknown or would have to render anew."""
        return None

    def _tail(self, said: str, close: str, history: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool]) -> str:
        """Return the template's text behind `close`, which ends the reply. The text before `close` must equal `said`, the text
        of the tokens, or the rendering of the conversation up to the reply. Raises UserError if not."""
        after = self.text([*history, *new], tools)
        if after.startswith(said):
            return after[len(said) :]
        asked = self.text(history[:-1], tools, generate=False) if history[1:] else ""
        answered = self.text(history, tools, generate=False)
        head, _, blank = answered.rpartition(close)
        if head and not blank.strip() and answered.startswith(asked) and after.startswith(answered):
            return after[len(answered) - len(blank) :]
        raise UserError(_RENDERED_DIFFERENTLY)

    def forced(self, choice: str, tools: Sequence[Tool]) -> list[int]:
        """Return the forced beginning of a reply. `choice`: a call's `tool_choice`. Raises Refused if it names no tool."""
        kind, _, name = choice.partition(":")
        if kind not in ("required", "function"):
            return []
        names = [tool.name for tool in tools]
        if not names or (name and name not in names):
            allowed = ", ".join(names) or "the request's tools: there are none"
            raise Refused(400, f"tool_choice: '{name or choice}' is not one of {allowed}", "tool_choice")
        name = name or (names[0] if len(names) == 1 else "")
        return self.encode((self._thought.lstrip() if self._opened else "") + self.form.begin(name))

    def parse(
        self,
        given: Sequence[int],
        tokens: Sequence[int] | np.ndarray,
        tools: Sequence[Tool],
        seed: str = "",
        ended: bool = True,
    ) -> tuple[Message, bool]:
        """Return a reply as a message, and whether a tool call in it is malformed. Malformed calls stay text. Never raises.

        `given`: the reply's forced tokens. `seed`: the ids of calls differ for different seeds. If not `ended`, the message is
        the part of the reply's message that no further token changes."""
        ids = [*given, *np.asarray(tokens).tolist()]
        reasoning, text = "", self.tokenizer.decode([id for id in ids if id not in self._hidden], skip_special=False)
        if self.thinks:
            reasoning, text = self.form.part_reasoning(text, self._opened, ended)
        form = self.form if tools else self._plain
        found = form.read(text, tools, seed) if ended else form.settled(text, tools, seed)
        return Message("assistant", found.content, found.calls, reasoning=reasoning), found.malformed

    def write(self, message: Message) -> list[int]:
        """Return an assistant's message as the model would write it, with the token that ends it if the template has one."""
        prefix = self._thought.lstrip() if self._opened and not message.reasoning else ""
        text = self.form.write(message)
        text = text.removeprefix(self._think) if self._opened else text
        return [*self.encode(prefix + text), *([] if self._close_id is None else [self._close_id])]

    def _closing(self) -> tuple[str, int | None]:
        """Return the text and the id of the token by which the template ends a reply; "" and None without such a token."""
        _, answer, behind = self._text_if_any(_ANSWERED, (), generate=False).rpartition(_ANSWERED[-1].content)
        added = self.tokenizer.added_tokens.items()
        fits = {token.content: id for id, token in added if answer and behind.lstrip().startswith(token.content)}
        close = max(fits, key=len, default="")
        return close, fits.get(close)

    def _tools_of_template(self) -> tuple[str, bool]:
        """Return the name of the template's format of tool calls, and whether the template lists the tools to the model."""
        asked, before = (self._text_if_any(_ANSWERED[:1], (_TOOL,), generate=generate) for generate in (True, False))
        called = self._text_if_any((_ANSWERED[0], _CALLING), (_TOOL,), generate=False)
        if not called:
            self._parses_arguments = False
            called = self._text_if_any((_ANSWERED[0], _CALLING), (_TOOL,), generate=False)
        if not asked or not called:
            return "none", False
        # Only the reply is read: the instructions before it may have calls as examples.
        reply = called.removeprefix(asked if called.startswith(asked) else before)
        if reply == called and self._close:  # the template begins differently if messages follow
            reply = called.rpartition(self._close)[0].rpartition(self._close)[2]
        reply = reply.partition(self._close)[0] if self._close else reply
        for name, form in FORMATS.items():
            found = form.read(reply, (_TOOL,)).calls
            if [(call.name, json.loads(call.arguments)) for call in found] == [(_TOOL.name, {"x": 1, "text": "a 1"})]:
                return name, _TOOL.name in asked
        return "none", _TOOL.name in asked

    def _text_if_any(self, messages: Sequence[Message], tools: Sequence[Tool], generate: bool = True) -> str:
        """Return `text`, or "" if the template refuses the conversation."""
        try:
            return self.text(messages, tools, generate)
        except UserError:
            return ""

    def _bridge_fault(self) -> str:
        """Return why the template and the tokenizer allow no text behind replies; "" if they allow it. The token that ends a
        reply must split the text: the parts before and after it encode alike alone and together."""
        if self._close_id is None:
            answered, after = self._text_if_any(_ANSWERED, (), False), self._text_if_any((*_ANSWERED, *_ANSWERED[:1]), ())
            first = self.encode(after.removeprefix(answered))[:1]
            splits = first and first[0] in self.tokenizer.added_tokens and first[0] in self.stop_ids
            return "" if splits else "the template ends replies with no token of its own"
        for probe in conversations():
            text = self._text_if_any(probe.messages, probe.tools if self.takes_tools else ())
            head, *rest = text.split(self._close)
            parts = [self.encode(head), *(self.encode(self._close + part) for part in rest)]
            whole = [id for part in parts for id in part]
            self.decodes_parts &= "".join(map(self.decode, parts)) == self.decode(whole)
            if whole != self.encode(text) or any(part[0] != self._close_id for part in parts[1:]):
                return f"text around {self._close} is encoded differently on its own"
        return ""


_RENDERED_DIFFERENTLY = "the template renders messages differently if more messages follow"
_ANSWERED = (Message("user", "Is it 3?"), Message("assistant", "It is 8 instead."))
_TOOL = Tool("a_probe", "Probes.", {"type": "object", "properties": {"x": {"type": "integer"}, "text": {"type": "string"}}})
# Templates of Mistral want ids of nine characters, those of Kimi ids that name the tool.
_CALLING = Message("assistant", tool_calls=(ToolCall("a_probe:0", _TOOL.name, '{"x": 1, "text": "a 1"}'),))


def as_openai(message: Message, parsed: bool = True) -> dict[str, Any]:
    """Return the message in OpenAI's shape, as Hugging Face's templates take it. `parsed`: arguments are objects if they are
    JSON, else they are JSON text."""
    shaped: dict[str, Any] = {"role": message.role, "content": message.content}
    arguments = _parsed if parsed else str
    if message.tool_calls:
        shaped["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments(call.arguments)}}
            for call in message.tool_calls
        ]
    rest = {"tool_call_id": message.tool_call_id, "name": message.name, "reasoning_content": message.reasoning}
    return shaped | {key: value for key, value in rest.items() if value}


def functions(tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
    """Return the tools in OpenAI's shape; None without tools."""
    return [{"type": "function", "function": structs.asdict(tool)} for tool in tools] or None


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


# ---- Family rendering
# The `renderers` package continues conversations of some model families. It is used if a template renders earlier messages
# differently once others follow, so that two renderings prove nothing. Example: Qwen 3's template leaves out the reasoning
# before the last question. Prompts are still rendered by the template.

log = logging.getLogger("sluice")

_QWEN35 = ("Qwen35Renderer", "Qwen36Renderer", "Qwen38Renderer")  # these have one model_type and different templates
FAMILIES = {"qwen3": ("Qwen3Renderer",), "qwen3_moe": ("Qwen3Renderer",), "qwen3_5": _QWEN35, "qwen3_5_moe": _QWEN35}


class FamilyRenderer(TemplateRenderer):
    """Continues conversations by the `renderers` package; if the package cannot, by the difference of two renderings."""

    def __init__(self, tokenizer: Tokenizer, tools: str, family: Any):
        super().__init__(tokenizer, tools)
        self._family = family

    def family_bridge(self, tokens: np.ndarray, reply: int, new: Sequence[Message], tools: Sequence[Tool]) -> list[int] | None:
        before = tokens.tolist()
        at = len(before) - reply
        shaped = [as_openai(message) for message in new]
        found = self._family.bridge_to_next_turn(before[:at], before[at:], shaped, tools=functions(tools))
        if found is None or list(found.token_ids[: len(before)]) != before:
            return None
        return list(found.token_ids[len(before) :])

    def fault(self) -> str:
        """Return the first conversation that the family renders differently from the template; "" if there is none."""
        for probe in conversations():
            tools = probe.tools if self.takes_tools else ()
            if probe.tools and not tools:
                continue
            for end, message in enumerate(probe.messages):
                if message.role == "assistant":
                    shaped = [as_openai(each) for each in probe.messages[:end]]
                    ids = self._family.render_ids(shaped, tools=functions(tools), add_generation_prompt=True)
                    if ids != self.encode(self.text(probe.messages[:end], tools)):
                        return f"'{probe.name}', message {end}"
        return ""


def renderer_of(tokenizer: Tokenizer, tools: str, model_folder: Path | str) -> TemplateRenderer:
    """Return a family renderer if the package knows the model's family and renders like the template; else a template's."""
    file = Path(model_folder) / "config.json"
    names = FAMILIES.get(read_object(file, f"model.path: {file}").get("model_type", ""), ()) if file.is_file() else ()
    faults = []
    for name in names:
        try:
            found = _made(name, tokenizer, tools)
            if not (where := found.fault()):
                return found
            faults.append(f"{name} renders {where} differently")
        except UserError as error:
            faults.append(f"{name}: {error}")
    if faults:
        log.warning("the chat template continues conversations, not the renderers package: %s", "; ".join(faults))
    return TemplateRenderer(tokenizer, tools)


def _made(name: str, tokenizer: Tokenizer, tools: str) -> FamilyRenderer:
    try:
        import renderers

        return FamilyRenderer(tokenizer, tools, getattr(renderers, name)(_PlainTokenizer(tokenizer)))
    except Exception as error:  # the package is missing, or it rejects the tokenizer
        raise UserError(f"{type(error).__name__}: {error}") from error


class _PlainTokenizer:
    """The interface of a tokenizer that the package needs."""

    unk_token_id = None

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self.name_or_path = str(tokenizer.folder)
        self.eos_token_id = tokenizer.eos_ids[0]

    def encode(self, text: str, **_: Any) -> list[int]:
        return self._tokenizer.encode_texts([text])[0].tolist()

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return self._tokenizer.decode(ids, skip_special=False)

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return self._tokenizer.vocabulary.get(token)
