"""Named templates: what stands around system text, problem and replies, as data in a JSON file.

The file is a list of objects as LLaMA-Factory and MindSpeed-RL write them. A part's `slots` are strings with `{{content}}` for
the text, or name a special token (`["bos_token"]`, `{"token": "<x>"}`). Of such an object everything counts that is part of a
prompt, or ends a reply; what it says of tools, and of how supervised training pads, does not.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import xxhash

from runtime.errors import UserError

if TYPE_CHECKING:
    from runtime.data.templates import Message

MODEL = "model"  # the prompt type that is the model's own chat template
BUILT_IN = Path(__file__).parent / "templates.json"  # configs/templates.json of the source tree

Slot = str | list[str] | dict[str, str]


class PromptPart(msgspec.Struct, frozen=True):
    """What is written for one message."""

    slots: list[Slot]


_TEXT = PromptPart(["{{content}}"])


class PromptType(msgspec.Struct, frozen=True):
    """One object of the file. A part that is left out is the text alone, with the end-of-sequence token behind a reply."""

    name: str
    format_user: PromptPart | None = None
    format_assistant: PromptPart | None = None
    format_system: PromptPart | None = None
    format_separator: PromptPart | None = None  # before every user's message but the first
    format_prefix: PromptPart | None = None  # once, before everything
    default_system: str | list[str] = ""
    stop_words: list[str] = []  # tokens that end a reply, beside the model's own
    efficient_eos: bool = False  # no end-of-sequence token after a reply

    @property
    def system_in_user(self) -> bool:
        """Llama 2 takes the system text into the first message: by the name, as in the other programs that read this format."""
        return self.name.startswith("llama2")


class SlotTemplate:
    """A prompt type with the model's special tokens; renders what `ChatTemplate` renders."""

    def __init__(self, prompt_type: PromptType, special_tokens: Mapping[str, str], origin: str):
        """`origin` names the template in errors. Raises UserError when a part has no place for its text."""
        eos: list[Slot] = [] if prompt_type.efficient_eos else [["eos_token"]]
        self.origin = origin
        self._special_tokens = dict(special_tokens)
        self._user = (prompt_type.format_user or _TEXT).slots
        self._assistant = prompt_type.format_assistant.slots if prompt_type.format_assistant else [*_TEXT.slots, *eos]
        self._system = (prompt_type.format_system or _TEXT).slots
        self._separator = prompt_type.format_separator.slots if prompt_type.format_separator else []
        self._prefix = prompt_type.format_prefix.slots if prompt_type.format_prefix else []
        self._default_system = "".join(prompt_type.default_system)
        self._system_in_user = prompt_type.system_in_user
        self.stop_words = tuple(prompt_type.stop_words)
        for part, slots in (("user", self._user), ("assistant", self._assistant), ("system", self._system)):
            if not any(isinstance(slot, str) and "{{content}}" in slot for slot in slots):
                raise UserError(f"{origin}: format_{part} has no {{{{content}}}}")

    @property
    def identity(self) -> str:
        """Equal where every conversation is rendered alike."""
        parts = (self._user, self._assistant, self._system, self._separator, self._prefix)
        rest = (self._default_system, self._system_in_user, self._special_tokens)
        return xxhash.xxh3_64_hexdigest(msgspec.json.encode((parts, rest), order="sorted"))

    def render(self, messages: Sequence[Message]) -> str:
        """The conversation as text, ready for the next reply when it ends with the user. Raises UserError for other roles."""
        system, turns = self._default_system, list(messages)
        if turns and turns[0]["role"] == "system":
            system = turns.pop(0)["content"] or system
        before = self._fill(self._system, system) if system else ""
        text = self._fill(self._prefix) + ("" if self._system_in_user else before)
        for index, turn in enumerate(turns):
            role, content = turn["role"], turn["content"]
            if role == "user":
                if index:
                    text += self._fill(self._separator)
                elif self._system_in_user:
                    content = before + content
                text += self._fill(self._user, content, index // 2)
            elif role == "assistant":
                text += self._fill(self._assistant, content)
            else:
                raise UserError(f"{self.origin}: cannot render a message of role {role!r} here")
        return text

    def _fill(self, slots: Sequence[Slot], content: str = "", turn: int = 0) -> str:
        return "".join(self._slot(slot, content, turn) for slot in slots)

    def _slot(self, slot: Slot, content: str, turn: int) -> str:
        if isinstance(slot, str):
            return slot.replace("{{idx}}", str(turn)).replace("{{content}}", content)
        if isinstance(slot, dict):
            return slot.get("token", "")
        return "".join(self._special_tokens.get(name, "") for name in slot)  # a token that the model lacks is left out


def slot_template(name: str, path: str, special_tokens: Mapping[str, str], section: str = "data.") -> SlotTemplate:
    """The template called `name`: of the file `path` when there is one and it has it, else of those that come with Sluice.

    `section` is what stands before the keys in errors. Raises UserError for an unknown name and an unusable file.
    """
    found = _known(path, section)
    if name not in found:
        raise UserError(f"{section}prompt_type: '{name}' is not one of {', '.join([MODEL, *sorted(found)])}")
    return SlotTemplate(found[name], special_tokens, f"{section}prompt_type: {name}")


def names(path: str, section: str = "data.") -> list[str]:
    """What `prompt_type` may be, with the file `path`. Raises UserError."""
    return [MODEL, *sorted(_known(path, section))]


def _known(path: str, section: str) -> dict[str, PromptType]:
    return _read(BUILT_IN, section) | (_read(Path(path), section) if path else {})


def _read(path: Path, section: str) -> dict[str, PromptType]:
    where = f"{section}prompt_type_path: {os.fspath(path)}"
    try:
        listed = msgspec.json.decode(path.read_bytes(), type=list[PromptType])
    except OSError as error:
        raise UserError(f"{where}: {(error.strerror or str(error)).lower()}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{where}: not a list of templates: {error}") from error
    return {prompt_type.name: prompt_type for prompt_type in listed}
