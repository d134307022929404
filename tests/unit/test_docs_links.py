"""Links between the pages of the documentation: the files are there, and the headings within."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest

from launcher import config_reference
from runtime import run_files
from tests.unit.zh_pages import GENERATED

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
WITH_KEYS = [page for page in PAGES if page.name != "configuration-reference.md"]
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\]\(\s*<?([^()\s>]+)>?\s*\)")
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.MULTILINE)
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    assert list(dead(page, page.read_text(encoding="utf-8"))) == []


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


@pytest.mark.parametrize("page", WITH_KEYS, ids=lambda page: str(page.relative_to(ROOT)))
def test_keys_that_are_named_exist(page: Path) -> None:
    """A dotted name in code that begins with a section of the configuration is one of its keys, or a section.

    The tables that are generated have MindSpeed-RL's names too; test_config_reference looks at ours in them. In the tables of
    the page on verl and TRL the first column is theirs.
    """
    text = GENERATED.sub("", page.read_text(encoding="utf-8"))
    if page.name == "verl-and-trl.md":
        text = re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE)
    known = {key.path for part in config_reference.parts() for key in part.keys} | {
        part.path for part in config_reference.parts()
    }
    plain = {path.replace("[]", "") for path in known}
    sections = {path.partition(".")[0] for path in plain}
    named = re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?=[`:=])", text)
    others = ("model.embed_tokens.", "model.norm.", "model.safetensors", run_files.METRICS, "metrics.png")  # tensors, and files
    wrong = {name for name in named if name.partition(".")[0] in sections and name not in plain}
    assert {name for name in wrong if not name.startswith(others)} == set()
