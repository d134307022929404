"""Links between the pages of the documentation: the files are there, and the headings within. Tables are as readers show."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import unquote

from launcher import config_reference
from runtime import run_files
from tests.unit.zh_pages import GENERATED

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\]\(\s*<?([^()\s>]+)>?\s*\)")
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.MULTILINE)
TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
DASHES = re.compile(r"\|( *:?-+:? *\|)+")
NAMED = re.compile(r"<a (?:id|name)=\"([^\"]+)\"")


def links(text: str) -> Iterator[str]:
    """What a page links to within the repository."""
    found = LINK.findall(CODE.sub("`", FENCE.sub("", text)))
    yield from (link for link in found if not re.match(r"[a-z]+:", link))


def anchors(text: str) -> set[str]:
    """The names of a page's headings, as GitHub makes them: small letters, no punctuation, the second of a name `-1`."""
    found: set[str] = set(NAMED.findall(text))
    for heading in HEADING.findall(FENCE.sub("", text)):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        times = sum(1 for one in found if re.fullmatch(rf"{re.escape(name)}(-\d+)?", one))
        found.add(f"{name}-{times}" if times else name)
    return found


@cache
def anchors_of(page: Path) -> set[str]:
    return anchors(page.read_text(encoding="utf-8"))


def dead(page: Path, text: str) -> Iterator[str]:
    """The links of a page that lead nowhere."""
    for link in links(text):
        path, _, anchor = unquote(link).partition("#")
        target = (page.parent / path).resolve() if path else page
        if target != page and not target.exists():
            yield f"{link}: no such file"
        elif anchor and anchor not in (anchors_of(target) if target != page else anchors(text)):
            yield f"{link}: no such heading"


def torn(text: str) -> Iterator[str]:
    """Lines for which no reader shows a table: a head without dashes below it, a row of another number of cells."""
    for table in TABLE.findall(FENCE.sub("", text)):
        head, *rest = [re.sub(r"\\\|", "", line).count("|") for line in table.splitlines()]
        if not DASHES.fullmatch(table.partition("\n")[2].partition("\n")[0]):
            yield table.partition("\n")[0]
        yield from (line for line, cells in zip(table.splitlines()[1:], rest, strict=True) if cells != head)


def test_every_link_leads_somewhere_and_every_table_is_one() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert (list(dead(page, text)), list(torn(text))) == ([], []), page


def test_a_torn_table_is_found() -> None:
    good = "| a | b |\n| --- | ---: |\n| 1 | `x \\| y` |\n"
    assert list(torn(good)) == []
    assert list(torn(good.replace("---:", "−--"))) == ["| a | b |"]
    assert list(torn(good.replace("1 |", "1 | 2 |"))) == ["| 1 | 2 | `x \\| y` |"]


def test_a_link_that_leads_nowhere_is_found() -> None:
    text = (
        "# A `b`: c!\n## 训练侧\n## Twice\n## Twice\n[a](#a-b-c) [b](#训练侧) [c](#twice-1) [d](README.md#nope) `[e](f.md)`\n"
        "[g](g.md) [h](docs) [i](https://example.org/x.md) [j](#twice-2)\n```\n[k](k.md)\n# no\n```\n[l](#no)\n"
    )
    assert list(dead(ROOT / "x.md", text)) == [
        "README.md#nope: no such heading",
        "g.md: no such file",
        "#twice-2: no such heading",
        "#no: no such heading",
    ]


def test_keys_that_are_named_exist() -> None:
    """A dotted name in code that begins with a section of the configuration is one of its keys, or a section.

    The tables that are generated have MindSpeed-RL's names too; test_config_reference looks at ours in them. In the tables of
    the page on verl and TRL the first column is theirs.
    """
    parts = list(config_reference.parts())
    plain = {path.replace("[]", "") for part in parts for path in (part.path, *(key.path for key in part.keys))}
    sections = {path.partition(".")[0] for path in plain}
    others = ("model.embed_tokens.", "model.norm.", "model.safetensors", run_files.METRICS, "metrics.png")  # tensors, and files
    for page in (each for each in PAGES if each.name != "configuration-reference.md"):
        text = GENERATED.sub("", page.read_text(encoding="utf-8"))
        if page.name == "verl-and-trl.md":
            text = re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE)
        named = set(re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?=[`:=])", text))
        wrong = {name for name in named - plain if name.partition(".")[0] in sections}
        assert {name for name in wrong if not name.startswith(others)} == set(), page
