"""What the pages show in blocks and in `code`. Read here, and held to the real thing by test_docs_blocks.py."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
# What the word after a fence may be; "" and bash: commands. Output and pictures of folders are `text`.
KINDS = ("", "bash", "yaml", "json", "python", "mermaid", "text")

_FENCE = re.compile(r"^ *(```|~~~) *(?P<kind>.*?) *$")
_NAME = re.compile(r"# (\S+\.(?:py|yaml))(?:,.*)?\n")
_ENDS = (";", "&&", "||", "|", "&")


class Block(NamedTuple):
    page: str  # from the repository's root
    line: int  # of its first fence
    kind: str
    text: str

    @property
    def file(self) -> str:
        """The file that its first line names: `# rules/brief.py`; "" where it names none."""
        found = _NAME.match(self.text)
        return found[1] if found else ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(*kinds: str) -> list[Block]:
    """Those of these kinds on all pages."""
    return [block for page in PAGES for block in read(page) if block.kind in kinds]


@cache
def read(page: Path) -> list[Block]:
    return split(page.read_text(encoding="utf-8"), str(page.relative_to(ROOT)))


def split(text: str, page: str) -> list[Block]:
    """The fenced blocks of a page. Raises ValueError for one that does not end."""
    found: list[Block] = []
    opened: tuple[int, str] | None = None
    inside: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        fence = _FENCE.match(line)
        if fence and opened is None:
            opened, inside = (number, fence["kind"]), []
        elif fence and opened is not None:
            found.append(Block(page, *opened, "".join(inside)))
            opened = None
        else:
            inside.append(f"{line}\n")
    if opened is not None:
        raise ValueError(f"{page}:{opened[0]}: the block does not end")
    return found


def own_files() -> dict[str, str]:
    """The files that pages let the reader write, by their names."""
    return {block.file: block.text for block in blocks("python", "yaml") if block.file}


def commands(text: str) -> list[list[str]]:
    """The words of each command of a block: lines that go on are joined, comments and redirections left out.

    Raises ValueError for a quotation that does not end.
    """
    found: list[list[str]] = []
    for line in re.sub(r"\\\n", " ", text).splitlines():
        reader = shlex.shlex(line, posix=True, punctuation_chars=True)
        reader.wordchars += "=@$:,{}[]!"
        command: list[str] = []
        words = iter(reader)
        for word in words:
            if word in _ENDS:
                found.append(command)
                command = []
            elif word.startswith((">", "<")):
                next(words)
            else:
                command.append(word)
        found.append(command)
    return [command for command in found if command]


@cache
def inline(page: Path) -> list[str]:
    """What stands in `code` on a page outside of blocks; a line may end within it. A table's `\\|` is a `|`."""
    plain = re.sub(r"^ *(```|~~~).*?^ *\1", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    found = (code for _, code in re.findall(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", plain, re.DOTALL))
    return [" ".join(code.split()).replace("\\|", "|") for code in found]
