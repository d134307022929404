"""How a text gets to a terminal, whoever wrote it: replies, labels, what an error says. Nothing in it is an order.

Neither to the terminal, whose escape sequences set its title, clear it or write to the clipboard, nor to rich, for which
`[/path/of/a/file]` is the end of a style, and an error where none has begun. Lines of JSON hold every text as it is: JSON has
escapes of its own.
"""

from __future__ import annotations

import re
from typing import Any

from rich import table
from rich.console import Console, RenderableType
from rich.text import Text

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""C0 but for tab and line feed, DEL, C1; what changes the direction of writing, so that a line reads other than it is, or ends
it (Unicode's UAX 9, section 2); and surrogates, which no encoding of a terminal has."""


def shown(text: str) -> str:
    """The text with its control characters as Python writes them: `\\x1b` for the escape."""
    return _CONTROL.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def literal(text: str, style: str = "") -> Text:
    """For rich: the text as it is, without markup, emoji codes or highlights. Tabs are spaces: rich measures them as less."""
    return Text(shown(text).expandtabs(), style)


def say(console: Console, line: str, style: str = "") -> None:
    """A line, which the terminal wraps where it has to."""
    console.print(literal(line, style), soft_wrap=True)


class LiteralTable(table.Table):
    """rich's, whose title, headers and cells are literal."""

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
