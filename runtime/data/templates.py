"""Chat templates: jinja2 in a sandbox, with the settings, filters and globals that Hugging Face templates are written for.

The environment is the one documented for `apply_chat_template`: blocks trimmed, `tojson` without HTML escapes,
`raise_exception`, `strftime_now`, loop controls, and the `generation` tag, which has no effect on the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.metadata import version
from time import strftime
from types import FunctionType
from typing import Any, NoReturn

import jinja2
import xxhash
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from runtime.data.template_sandbox import CountedSandbox
from runtime.errors import UserError

Message = Mapping[str, Any]


_MOST_CHARACTERS = 1 << 22  # of a conversation
_LEAST_JINJA = (3, 1, 6)  # whose sandbox lets no code out, as far as is known
_BARE: dict[str, Any] = {"__builtins__": {}}  # the globals of functions that templates see hold nothing that they do not need


class ChatTemplate:
    """A compiled template with the model's special tokens (`bos_token`, `eos_token` ...) as its variables."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], origin: str, with_tools: str = ""):
        """`origin` names the template in errors; `with_tools` is that of conversations with tools, where it is another. Raises
        UserError when either is not a template."""
        self.origin = origin
        self.stop_words: tuple[str, ...] = ()
        self.source = source
        self._variables = dict(special_tokens)
        self._with_tools = ChatTemplate(with_tools, special_tokens, origin) if with_tools else None
        self._environment = _environment()
        try:
            self._template = self._environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"{origin}: not a chat template: line {error.lineno}: {error.message}") from error
        except Exception as error:  # whatever Python's compiler raises at what jinja2 makes of it
            raise UserError(f"{origin}: not a chat template: {_line(error)}") from error

    @property
    def identity(self) -> str:
        """Equal where every conversation is rendered alike."""
        more = [self._with_tools.source] if self._with_tools else []
        return xxhash.xxh3_64_hexdigest(json.dumps([self.source, self._variables, *more], sort_keys=True).encode())

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The conversation as text, special tokens included, up to where the reply begins (`add_generation_prompt`).

        `tools`: functions as OpenAI describes them, which some templates list. Raises UserError when the template refuses the
        messages.
        """
        if tools is not None and self._with_tools:
            return self._with_tools.render(messages, add_generation_prompt, tools)
        self._environment.begin()
        try:
            text = self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
        except Exception as error:  # whatever a stranger's template does: divide by zero, call itself without end
            raise UserError(f"{self.origin}: the chat template cannot render the messages: {_line(error)}") from error
        if len(text) > _MOST_CHARACTERS:
            raise UserError(f"{self.origin}: the chat template makes {len(text)} characters of the messages")
        return text


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class _Generation(Extension):
    """`{% generation %}` marks the assistant's tokens for supervised training; here its body is plain text."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


@lru_cache(maxsize=1)
def _environment() -> CountedSandbox:
    """Raises UserError for a jinja2 whose sandbox is known to let code out."""
    if (found := tuple(map(int, re.findall(r"\d+", version("jinja2"))[:3]))) < _LEAST_JINJA:
        least = ".".join(map(str, _LEAST_JINJA))
        raise UserError(f"jinja2: {'.'.join(map(str, found))} is installed; chat templates need {least} or newer")
    environment = CountedSandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = environment.counted("tojson", _tojson)
    environment.globals["raise_exception"] = FunctionType(_raise_exception.__code__, {"TemplateError": TemplateError, **_BARE})
    environment.globals["strftime_now"] = FunctionType(_strftime_now.__code__, {"strftime": strftime, **_BARE})
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return strftime(form[:100])
