"""Conversations continued by the `renderers` package, which knows how the models of some families go on.

It is taken where a template renders earlier messages otherwise once others follow, so that two renderings prove nothing: those
of Qwen 3 leave out what was reasoned before the last question. The template stays what prompts are rendered with.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from runtime.data.tokenizer import Tokenizer
from runtime.errors import UserError
from runtime.gateway.conversation import Message, Tool
from runtime.gateway.probes import conversations
from runtime.gateway.rendering import TemplateRenderer, as_openai, functions
from runtime.gateway.tool_calls import Format
from runtime.json_file import read_object

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
