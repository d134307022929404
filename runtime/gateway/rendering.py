"""Conversations as tokens, and replies as messages: what is told apart by the model's family or by its chat template.

A prompt that continues a reply is never rendered anew: what the model wrote stays as it is, and what follows is put behind it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from msgspec import structs

from runtime.data.handlers import SlotTemplate
from runtime.data.tokenizer import Tokenizer
from runtime.errors import UserError
from runtime.gateway import tool_calls
from runtime.gateway.conversation import Message, Refused, Tool, ToolCall
from runtime.gateway.probes import conversations
from runtime.gateway.tool_calls import THINK, THOUGHT, Format
from runtime.run_files import read_object


class TemplateRenderer:
    """By the model's own chat template. A conversation is continued by the difference between two renderings. Every method may
    run in a thread beside others.

    `stop_ids`: what ends a reply. `decodes_parts`: a conversation's text is that of its parts, cut before or behind one.
    """

    def __init__(self, tokenizer: Tokenizer, tools: Literal["auto"] | Format = "auto"):
        """`tools`: how calls are written; "auto": as the template writes one."""
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
        self._hidden = {*tokenizer.hidden_ids.tolist(), *self.stop_ids}
        self.decodes_parts = True
        self._doubt = self._why_not()

    def encode(self, text: str) -> list[int]:
        """Raises Refused."""
        try:
            return self.tokenizer.encode_texts([text])[0].tolist()
        except UserError as error:
            raise Refused(400, str(error)) from error

    def decode(self, tokens: Sequence[int] | np.ndarray, last: Sequence[int] | np.ndarray = ()) -> str:
        """Their text, special tokens included, where they stand behind the token `last`."""
        if not len(last):
            return self.tokenizer.decode(tokens, skip_special=False)
        text = self.tokenizer.decode(np.concatenate([last, tokens]), skip_special=False)
        return text[len(self.tokenizer.decode(last, skip_special=False)) :]

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """The conversation up to where the reply begins. Raises Refused for what the model's template cannot render."""
        if tools and not self.takes_tools:
            why = "knows no tools" if not self._lists_tools else "does not write calls in a way that is known here"
            raise Refused(400, f"tools: the model's chat template {why}", "tools")
        if not self.takes_tools and any(message.tool_calls for message in messages):
            raise Refused(400, "messages: calls of tools, which the model's chat template does not know", "messages")
        try:
            return self.encode(self.text(messages, tools))
        except UserError as error:
            raise Refused(400, f"messages: {error}", "messages") from error

    def text(self, messages: Sequence[Message], tools: Sequence[Tool], generate: bool = True) -> str:
        """The conversation up to where a reply begins, or without that (`generate`). Raises UserError."""
        shaped = [as_openai(message) for message in messages]
        if isinstance(self.template, SlotTemplate):
            return self.template.render(shaped)
        return self.template.render(shaped, generate, functions(tools))

    def bridge(
        self,
        tokens: np.ndarray,
        reply: int,
        ended: bool,
        history: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[Tool],
        said: Callable[[], str] | None = None,
    ) -> list[int] | str:
        """What is put behind `tokens` (int32), which end with the `reply` tokens of the last of `history`, so that the model
        answers to the messages `new`; or a reason why it cannot be proved that this continues the conversation as it would
        have been rendered. `ended`: the reply ended with one of `stop_ids`. `said`: the text of `tokens`, where it is known
        without decoding all of them."""
        if (known := self.bridge_of_family(tokens, reply, new, tools)) is not None:
            return known
        if self._doubt:
            return self._doubt
        last = history[-1]
        if ended and tokens[-1] != self._close_id:
            return f"the reply ended with {self.decode(tokens[-1:])}, not {self._close}"
        if not ended and last.reasoning and not last.content and not last.tool_calls:
            return "the reply was cut off while it reasoned"
        try:
            tail = self._tail(said() if said else self.decode(tokens), ended, history, new, tools)
        except UserError as error:
            return str(error)
        added = self.encode(self._close + tail)
        return added[1:] if ended else added

    def bridge_of_family(
        self, tokens: np.ndarray, reply: int, new: Sequence[Message], tools: Sequence[Tool]
    ) -> list[int] | None:
        """As `bridge`, where the model's family is known; None where it is not, or would have to render anew."""
        return None

    def _tail(self, so_far: str, ended: bool, history: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool]) -> str:
        """What the template writes behind the token that ends the reply. Raises UserError, also where what it writes before is
        not the same: neither to the letter what the tokens say, nor what it writes of the conversation up to the reply."""
        after = self.text([*history, *new], tools)
        said = so_far if ended else so_far + self._close
        if after.startswith(said):
            return after[len(said) :]
        asked = self.text(history[:-1], tools, generate=False) if history[1:] else ""
        answered = self.text(history, tools, generate=False)
        head, _, blank = answered.rpartition(self._close)
        if head and not blank.strip() and answered.startswith(asked) and after.startswith(answered):
            return after[len(answered) - len(blank) :]
        raise UserError("the template renders messages otherwise when others follow")

    def forced(self, choice: str, tools: Sequence[Tool]) -> list[int]:
        """What the reply is made to begin with: `choice` is a call's `tool_choice`. Raises Refused."""
        kind, _, name = choice.partition(":")
        if kind not in ("required", "function"):
            return []
        names = [tool.name for tool in tools]
        if not names or (name and name not in names):
            allowed = ", ".join(names) or "tools, of which the request has none"
            raise Refused(400, f"tool_choice: '{name or choice}' is not one of {allowed}", "tool_choice")
        name = name or (names[0] if len(names) == 1 else "")
        return self.encode((f"{THOUGHT}\n\n" if self._opened else "") + tool_calls.begin(name, self.form))

    def parse(self, given: Sequence[int], tokens: Sequence[int] | np.ndarray, tools: Sequence[Tool]) -> Message:
        """A reply, of which the tokens `given` were forced. What is not a call of a tool is text. Raises nothing."""
        reasoning, text = self._parted(given, tokens)
        content, calls = tool_calls.read(text, self.form if tools else "none")
        return Message("assistant", content, calls, reasoning=reasoning)

    def visible(self, tokens: Sequence[int] | np.ndarray, given: Sequence[int] = ()) -> str:
        """The text of a reply so far that cannot change any more: it begins the message's `content`, and only grows."""
        reasoning, text = self._parted(given, tokens)
        if self.thinks and not reasoning and THINK.startswith(text.rstrip(tool_calls.INCOMPLETE).strip()):
            return ""
        return tool_calls.settled(text, self.form)

    def write(self, message: Message) -> list[int]:
        """An assistant's message as the model would write it, with what ends it."""
        prefix = f"{THOUGHT}\n\n" if self._opened and not message.reasoning else ""
        text = tool_calls.write(message, self.form)
        text = text.removeprefix(f"{THINK}\n") if self._opened else text
        return [*self.encode(prefix + text), self.stop_ids[0] if self._close_id is None else self._close_id]

    def end_of_call(self) -> str:
        """What a call of a tool ends with; "" where it ends with the reply."""
        return tool_calls.CLOSE if self.form == "hermes" else ""

    def _parted(self, given: Sequence[int], tokens: Sequence[int] | np.ndarray) -> tuple[str, str]:
        """What a reply reasons, and its text."""
        ids = [*given, *np.asarray(tokens).tolist()]
        text = self.tokenizer.decode([id for id in ids if id not in self._hidden], skip_special=False)
        return tool_calls.part_reasoning(text, self._opened) if self.thinks else ("", text)

    def _closing(self) -> tuple[str, int | None]:
        """The token by which the template ends a reply, as text and id; "" and None where it has none."""
        _, answer, behind = self._text_if_any(_ANSWERED, (), generate=False).rpartition(_ANSWERED[-1].content)
        added = self.tokenizer.added_tokens.items()
        fits = {token.content: id for id, token in added if answer and behind.lstrip().startswith(token.content)}
        close = max(fits, key=len, default="")
        return close, fits.get(close)

    def _tools_of_template(self) -> tuple[Format, bool]:
        """How it writes a call of a tool, and whether it tells the model of tools."""
        asked = self._text_if_any(_ANSWERED[:1], (_TOOL,))
        told = self._text_if_any((_ANSWERED[0], _CALLING), (_TOOL,), generate=False)
        if not asked or not told:
            return "none", False
        lists = _TOOL.name in asked
        replies: dict[Format, str] = {"hermes": told, "json": told.removeprefix(asked).partition(self._close or "\n")[0]}
        for form, reply in replies.items():
            calls = tool_calls.read(reply, form)[1]
            if [(call.name, json.loads(call.arguments)) for call in calls] == [(_TOOL.name, {"x": 1})]:
                return form, lists
        return "none", lists

    def _text_if_any(self, messages: Sequence[Message], tools: Sequence[Tool], generate: bool = True) -> str:
        """As `text`; "" where the template refuses the conversation."""
        try:
            return self.text(messages, tools, generate)
        except UserError:
            return ""

    def _why_not(self) -> str:
        """Why nothing can be put behind replies by this template and tokenizer; "" where it can: the token that ends a reply
        parts the text, so that what stands before it and what follows are encoded alike by themselves and together."""
        if self._close_id is None:
            return "the template ends replies with no token of its own"
        for probe in conversations():
            text = self._text_if_any(probe.messages, probe.tools if self.takes_tools else ())
            head, *rest = text.split(self._close)
            parts = [self.encode(head), *(self.encode(self._close + part) for part in rest)]
            whole = [id for part in parts for id in part]
            self.decodes_parts &= "".join(map(self.decode, parts)) == self.decode(whole)
            if whole != self.encode(text) or any(part[0] != self._close_id for part in parts[1:]):
                return f"text around {self._close} is encoded otherwise by itself"
        return ""


_ANSWERED = (Message("user", "Is it 3?"), Message("assistant", "It is 8 instead."))
_TOOL = Tool("tool_of_a_probe", "Tells.", {"type": "object", "properties": {"x": {"type": "integer"}}})
_CALLING = Message("assistant", tool_calls=(ToolCall("call_0", _TOOL.name, '{"x": 1}'),))


def as_openai(message: Message) -> dict[str, Any]:
    """As Hugging Face's templates take it: OpenAI's shape, but arguments as a mapping where they are one."""
    shaped: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        shaped["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _parsed(call.arguments)}}
            for call in message.tool_calls
        ]
    rest = {"tool_call_id": message.tool_call_id, "name": message.name, "reasoning_content": message.reasoning}
    return shaped | {key: value for key, value in rest.items() if value}


def functions(tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
    """Tools in OpenAI's shape; None where there are none."""
    return [{"type": "function", "function": structs.asdict(tool)} for tool in tools] or None


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


# ---- Family rendering
#
# Conversations continued by the `renderers` package, which knows how the models of some families go on.
#
# It is taken where a template renders earlier messages otherwise once others follow, so that two renderings prove nothing:
# those of Qwen 3 leave out what was reasoned before the last question. The template stays what prompts are rendered with.

log = logging.getLogger("sluice")

FAMILIES = {"qwen3": "Qwen3Renderer", "qwen3_moe": "Qwen3Renderer"}  # by model_type of config.json


class FamilyRenderer(TemplateRenderer):
    """By a renderer of that package; where it does not know either, by the difference of two renderings."""

    def __init__(self, tokenizer: Tokenizer, tools: Literal["auto"] | Format, family: Any):
        super().__init__(tokenizer, tools)
        self._family = family

    def bridge_of_family(
        self, tokens: np.ndarray, reply: int, new: Sequence[Message], tools: Sequence[Tool]
    ) -> list[int] | None:
        before = tokens.tolist()
        at = len(before) - reply
        shaped = [as_openai(message) for message in new]
        found = self._family.bridge_to_next_turn(before[:at], before[at:], shaped, tools=functions(tools))
        if found is None or list(found.token_ids[: len(before)]) != before:
            return None
        return list(found.token_ids[len(before) :])

    def fault(self) -> str:
        """Where the family renders a conversation otherwise than the template; "" where it never does."""
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
    """By the package where it is there, knows the family of the model in `model_folder` and renders as its template does."""
    return _family_renderer(tokenizer, tools, Path(model_folder) / "config.json") or TemplateRenderer(tokenizer, tools)


def _family_renderer(tokenizer: Tokenizer, tools: Literal["auto"] | Format, file: Path) -> FamilyRenderer | None:
    name = FAMILIES.get(read_object(file, f"model.path: {file}").get("model_type", "")) if file.is_file() else None
    if name is None:
        return None
    try:
        found = _made(name, tokenizer, tools)
        if not (where := found.fault()):
            return found
        why = f"it renders {where} otherwise"
    except UserError as error:
        why = str(error)
    log.warning("conversations are continued by the chat template, not by renderers' %s: %s", name, why)
    return None


def _made(name: str, tokenizer: Tokenizer, tools: Literal["auto"] | Format) -> FamilyRenderer:
    try:
        import renderers

        return FamilyRenderer(tokenizer, tools, getattr(renderers, name)(_PlainTokenizer(tokenizer)))
    except Exception as error:  # the package is not there, or whatever it says of a tokenizer that is not its family's
        raise UserError(f"{type(error).__name__}: {error}") from error


class _PlainTokenizer:
    """What the package asks of a tokenizer."""

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
