"""Prints untrusted text to a terminal: replies, labels, error messages. No part of a text is executed as a command.

A terminal's escape sequences can set its title, clear it, or write to the clipboard. To rich, `[/path/of/a/file]` is the end of
a style, and an error if no style is open. JSON lines keep every text: JSON escapes control characters itself."""

from __future__ import annotations

import re
from typing import Any

from rich import table
from rich.console import Console, RenderableType
from rich.text import Text

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""C0 except tab and line feed, DEL, C1. Characters that change the direction of writing or end a line (Unicode's UAX 9, section
2), so that a line reads differently. Surrogates, which no terminal encoding has."""


def shown(text: str) -> str:
    """Return the text with control characters escaped as in Python: `\\x1b` for the escape."""
    return _CONTROL.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def literal(text: str, style: str = "") -> Text:
    """Return the text for rich, without markup, emoji codes or highlights. Tabs become spaces: rich measures a tab as one."""
    return Text(shown(text).expandtabs(), style)


def say(console: Console, line: str, style: str = "") -> None:
    """Print a line; only the terminal wraps it."""
    console.print(literal(line, style), soft_wrap=True)


class LiteralTable(table.Table):
    """rich's table, with literal title, headers and cells."""

    def __init__(self, *headers: str, title: str = "", caption: str = "", **options: Any):
        super().__init__(
            *headers,
            title=literal(title, options.get("title_style", "table.title")) if title else None,
            caption=literal(caption, options.get("caption_style", "table.caption")) if caption else None,
            **options,
        )

    def add_column(self, header: RenderableType = "", *arguments: Any, **options: Any) -> None:
        super().add_column(_literal(header), *arguments, **options)

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        super().add_row(*map(_literal, cells), **options)


def _literal(cell: RenderableType | None) -> Any:
    return literal(cell) if isinstance(cell, str) else cell
