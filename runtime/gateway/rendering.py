"""Conversations as tokens and replies as messages, by the model's chat template or by its family.

A prompt that continues a reply is never rendered anew: the model's tokens stay, and the new messages are put behind them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec import Struct, structs

from runtime.data.handlers import SlotTemplate
from runtime.data.tokenizer import Tokenizer
from runtime.errors import UserError
from runtime.gateway import tool_calls
from runtime.gateway.conversation import Message, Refused, Tool, ToolCall
from runtime.gateway.tool_calls import THINK, THOUGHT, Format
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

    def __init__(self, tokenizer: Tokenizer, tools: Literal["auto"] | Format = "auto"):
        """Learn the template's format. `tools`: the format of calls; "auto": the format that the template writes."""
        self.tokenizer = tokenizer
        self.template = tokenizer.template
        self._close, self._close_id = self._closing()
        found, self._lists_tools = self._tools_of_template()
        self.form: Format = found if tools == "auto" else tools
        self.takes_tools = self._lists_tools and self.form != "none"
        closing = () if self._close_id is None else (self._close_id,)
        self.stop_ids = tuple(sorted({*tokenizer.stop_ids, *closing}))
        self._opened = self._text_if_any(_ANSWERED[:1], ()).rstrip().endswith(THINK)
        self.thinks = self._opened or THINK in tokenizer.vocabulary or THINK in getattr(self.template, "source", "")
        self._hidden = {*tokenizer.texts.hidden_ids.tolist(), *self.stop_ids}
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
            raise Refused(400, f"tools: the model's chat template {why}", "tools")
        if not self.takes_tools and any(message.tool_calls for message in messages):
            raise Refused(400, "messages: tool calls, which the model's chat template does not support", "messages")
        try:
            return self.encode(self.text(messages, tools))
        except UserError as error:
            raise Refused(400, f"messages: {error}", "messages") from error

    def text(self, messages: Sequence[Message], tools: Sequence[Tool], generate: bool = True) -> str:
        """Return the conversation as text; `generate`: up to where a reply begins. Raises UserError if it cannot."""
        shaped = [as_openai(message) for message in messages]
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
        if ended and tokens[-1] != self._close_id:
            return f"the reply ended with {self.decode(tokens[-1:])}, not {self._close}"
        if not ended and last.reasoning and not last.content and not last.tool_calls:
            return "the reply was cut off while it reasoned"
        try:
            tail = self._tail(said(), ended, history, new, tools)
        except UserError as error:
            return str(error)
        added = self.encode(self._close + tail)
        return added[1:] if ended else added

    def ends(self, tokens: np.ndarray) -> bool:
        """Return True if the last token ends a reply."""
        return int(tokens[-1]) in self.stop_ids

    def family_bridge(self, tokens: np.ndarray, reply: int, new: Sequence[Message], tools: Sequence[Tool]) -> list[int] | None:
        """Return the tokens to add, as `bridge`; None if the model's family is unknown or would have to render anew."""
        return None

    def _tail(self, so_far: str, ended: bool, history: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool]) -> str:
        """Return the template's text behind the token that ends the reply. The text before it must equal the text of the tokens
        or the rendering of the conversation up to the reply. Raises UserError if not."""
        after = self.text([*history, *new], tools)
        said = so_far if ended else so_far + self._close
        if after.startswith(said):
            return after[len(said) :]
        asked = self.text(history[:-1], tools, generate=False) if history[1:] else ""
        answered = self.text(history, tools, generate=False)
        head, _, blank = answered.rpartition(self._close)
        if head and not blank.strip() and answered.startswith(asked) and after.startswith(answered):
            return after[len(answered) - len(blank) :]
        raise UserError("the template renders messages differently if more messages follow")

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
        return self.encode((f"{THOUGHT}\n\n" if self._opened else "") + tool_calls.begin(name, self.form))

    def parse(self, given: Sequence[int], tokens: Sequence[int] | np.ndarray, tools: Sequence[Tool]) -> Message:
        """Return a reply as a message. `given`: its forced tokens. Invalid tool calls stay text. Never raises."""
        reasoning, text = self._split(given, tokens)
        content, calls = tool_calls.read(text, self.form if tools else "none")
        return Message("assistant", content, calls, reasoning=reasoning)

    def visible(self, tokens: Sequence[int] | np.ndarray, given: Sequence[int] = ()) -> str:
        """Return the part of a reply's text that no further token changes: a prefix of the message's `content`."""
        reasoning, text = self._split(given, tokens)
        if self.thinks and not reasoning and THINK.startswith(text.rstrip(tool_calls.INCOMPLETE).strip()):
            return ""
        return tool_calls.settled(text, self.form)

    def write(self, message: Message) -> list[int]:
        """Return an assistant's message as the model would write it, with the token that ends it."""
        prefix = f"{THOUGHT}\n\n" if self._opened and not message.reasoning else ""
        text = tool_calls.write(message, self.form)
        text = text.removeprefix(f"{THINK}\n") if self._opened else text
        return [*self.encode(prefix + text), self.stop_ids[0] if self._close_id is None else self._close_id]

    def _split(self, given: Sequence[int], tokens: Sequence[int] | np.ndarray) -> tuple[str, str]:
        """Return the reasoning and the text of a reply."""
        ids = [*given, *np.asarray(tokens).tolist()]
        text = self.tokenizer.decode([id for id in ids if id not in self._hidden], skip_special=False)
        return tool_calls.part_reasoning(text, self._opened) if self.thinks else ("", text)

    def _closing(self) -> tuple[str, int | None]:
        """Return the text and the id of the token by which the template ends a reply; "" and None without such a token."""
        _, answer, behind = self._text_if_any(_ANSWERED, (), generate=False).rpartition(_ANSWERED[-1].content)
        added = self.tokenizer.added_tokens.items()
        fits = {token.content: id for id, token in added if answer and behind.lstrip().startswith(token.content)}
        close = max(fits, key=len, default="")
        return close, fits.get(close)

    def _tools_of_template(self) -> tuple[Format, bool]:
        """Return the template's format of tool calls, and whether the template lists the tools to the model."""
        asked = self._text_if_any(_ANSWERED[:1], (_TOOL,))
        called = self._text_if_any((_ANSWERED[0], _CALLING), (_TOOL,), generate=False)
        if not asked or not called:
            return "none", False
        lists = _TOOL.name in asked
        replies: dict[Format, str] = {"hermes": called, "json": called.removeprefix(asked).partition(self._close or "\n")[0]}
        for form, reply in replies.items():
            calls = tool_calls.read(reply, form)[1]
            if [(call.name, json.loads(call.arguments)) for call in calls] == [(_TOOL.name, {"x": 1})]:
                return form, lists
        return "none", lists

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
            return "the template ends replies with no token of its own"
        for probe in conversations():
            text = self._text_if_any(probe.messages, probe.tools if self.takes_tools else ())
            head, *rest = text.split(self._close)
            parts = [self.encode(head), *(self.encode(self._close + part) for part in rest)]
            whole = [id for part in parts for id in part]
            self.decodes_parts &= "".join(map(self.decode, parts)) == self.decode(whole)
            if whole != self.encode(text) or any(part[0] != self._close_id for part in parts[1:]):
                return f"text around {self._close} is encoded differently on its own"
        return ""


_ANSWERED = (Message("user", "Is it 3?"), Message("assistant", "It is 8 instead."))
_TOOL = Tool("tool_of_a_probe", "Probes.", {"type": "object", "properties": {"x": {"type": "integer"}}})
_CALLING = Message("assistant", tool_calls=(ToolCall("call_0", _TOOL.name, '{"x": 1}'),))


def as_openai(message: Message) -> dict[str, Any]:
    """Return the message in OpenAI's shape, as Hugging Face's templates take it, but with parsed arguments if they are JSON."""
    shaped: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        shaped["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _parsed(call.arguments)}}
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

FAMILIES = {"qwen3": "Qwen3Renderer", "qwen3_moe": "Qwen3Renderer"}  # by model_type of config.json


class FamilyRenderer(TemplateRenderer):
    """Continues conversations by the `renderers` package; if the package cannot, by the difference of two renderings."""

    def __init__(self, tokenizer: Tokenizer, tools: Literal["auto"] | Format, family: Any):
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


def renderer_of(tokenizer: Tokenizer, tools: Literal["auto"] | Format, model_folder: Path | str) -> TemplateRenderer:
    """Return a family renderer if the package knows the model's family and renders like the template; else a template's."""
    file = Path(model_folder) / "config.json"
    name = FAMILIES.get(read_object(file, f"model.path: {file}").get("model_type", "")) if file.is_file() else None
    if name is not None:
        try:
            found = _made(name, tokenizer, tools)
            if not (where := found.fault()):
                return found
            why = f"it renders {where} differently"
        except UserError as error:
            why = str(error)
        log.warning("the chat template continues conversations, not %s of the renderers package: %s", name, why)
    return TemplateRenderer(tokenizer, tools)


def _made(name: str, tokenizer: Tokenizer, tools: Literal["auto"] | Format) -> FamilyRenderer:
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
