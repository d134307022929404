"""For docs/api.md: the fields of a class become a table at the end of its docstring. What is said of a field is the string
below it, else the comment beside it. An extension of griffe's, which mkdocs.yml names; nothing is imported but read.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

COMMENT = re.compile(r"  # (.*)$")


class FieldTables(griffe.Extension):
    """The fields are then no members any more, each with a heading of its own."""

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        source = cls.lines_collection[cls.filepath]
        fields = [
            member
            for name, member in cls.members.items()
            if isinstance(member, griffe.Attribute) and "property" not in member.labels and not name.startswith("_")
        ]
        for field in fields:
            cls.del_member(field.name)
        table = rows(fields, source, signature="dataclass" in cls.labels)
        if table:
            text = cls.docstring.value if cls.docstring else ""
            table = ["| field | type | default | |", "| --- | --- | --- | --- |", *table]
            cls.docstring = griffe.Docstring("\n".join([text, "", *table]), parent=cls)


def rows(fields: list[griffe.Attribute], source: list[str], signature: bool) -> list[str]:
    """Of those of which there is something to say; none where a signature that is shown besides says as much."""
    texts = [text_of(field, source) for field in fields]
    if signature and not any(texts):
        return []
    return [row(field, text) for field, text in zip(fields, texts, strict=True) if text or field.annotation]


def row(field: griffe.Attribute, text: str) -> str:
    """Only what the class's own body says has a default: what a method sets may be anything."""
    default = field.value if "class-attribute" in field.labels else None
    cells = [f"`{field.name}`", code(field.annotation), code(default), text.replace("|", "\\|")]
    return "| " + " | ".join(" ".join(cell.split()) for cell in cells) + " |"


def text_of(field: griffe.Attribute, source: list[str]) -> str:
    if field.docstring:
        return field.docstring.value
    found = COMMENT.search(source[(field.endlineno or field.lineno or 1) - 1])
    return found[1] if found else ""


def code(expression: Any) -> str:
    return f"`{expression}`" if expression is not None else ""
