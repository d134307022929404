"""Links between the pages of the documentation: the files are there, and the headings within. So are files and modules of ours
that docstrings, comments and the pages for developers name. Tables are such as readers show."""

from __future__ import annotations

import ast
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    assert list(dead(page, page.read_text(encoding="utf-8"))) == []


def torn(text: str) -> Iterator[str]:
    """Lines for which no reader shows a table: a head without dashes below it, a row of another number of cells."""
    for table in TABLE.findall(FENCE.sub("", text)):
        head, *rest = [re.sub(r"\\\|", "", line).count("|") for line in table.splitlines()]
        if not DASHES.fullmatch(table.partition("\n")[2].partition("\n")[0]):
            yield table.partition("\n")[0]
        yield from (line for line, cells in zip(table.splitlines()[1:], rest, strict=True) if cells != head)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_table_is_one(page: Path) -> None:
    assert list(torn(page.read_text(encoding="utf-8"))) == []


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


# ------------------------------------------------------------------------------------------------ files and modules of ours


FOLDERS = ("runtime", "services", "launcher", "sluice", "tests", "benchmarks", "configs")
FILES = {str(path.relative_to(ROOT)) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
CODE_FILES = [ROOT / name for name in sorted(FILES) if name.startswith(FOLDERS[:4]) and "/generated/" not in name]
FOR_DEVELOPERS = [ROOT / "CONTRIBUTING.md", ROOT / "docs/architecture.md", ROOT / "pyproject.toml"]
FILE = re.compile(r"(?<![\w/.{}-])(?:\w+/)*(?!FILE\.)\w+\.py\b")
MODULE = re.compile(r"\b((?:runtime|launcher|services\.rpc)(?:\.\w+)+)(?!\.?\w)")
EXAMPLES = {"rules/brief.py"}  # files of a user's


def said(path: Path, text: str) -> str:
    """A page, or what docstrings and comments of a module say."""
    if path.suffix != ".py":
        return text
    alone = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)]
    return "\n".join([*re.findall("#.*", text), *(str(one.value) for one in alone if isinstance(one, ast.Constant))])


def is_file(path: Path, name: str) -> bool:
    """A module names its neighbours by their names alone; other files, as pages do, by as much of the path as tells them."""
    if "/" in name or path.suffix != ".py":
        return any(f"/{each}".endswith(f"/{name}") for each in FILES)
    return (path.parent / name).exists()


def is_module(name: str) -> bool:
    """A module, a package, or what one defines."""
    module = name
    while (place := module.replace(".", "/")) and not (ROOT / place).exists() and f"{place}.py" not in FILES:
        module = module.rpartition(".")[0]
    source = ROOT / (f"{place}.py" if f"{place}.py" in FILES else f"{place}/__init__.py")
    rest = name[len(module) :].split(".")[1:2]
    return not rest or (source.exists() and re.search(rf"\b{rest[0]}\b", source.read_text()) is not None)


def missing(path: Path, text: str) -> list[str]:
    files = [name for name in FILE.findall(said(path, text)) if name not in EXAMPLES and not is_file(path, name)]
    return files + [name for name in MODULE.findall(said(path, text)) if not is_module(name)]


def test_every_file_and_module_that_is_named_exists() -> None:
    found = {str(path): missing(path, path.read_text()) for path in [*CODE_FILES, *FOR_DEVELOPERS]}
    assert {path: names for path, names in found.items() if names} == {}


def test_a_file_that_is_not_there_is_found() -> None:
    text = (
        '"""`critic.py`, `services/critic.py`, `runtime.weights.group.TRANSPORTS`, `runtime.weights.rendezvous.TRANSPORTS`"""'
    )
    text += "\n# runtime.nowhere.x, step.py, runtime.trainer.step\n"
    assert missing(ROOT / "runtime/trainer/x.py", text) == [
        "critic.py",
        "runtime.nowhere.x",
        "runtime.weights.group.TRANSPORTS",
    ]
    assert missing(ROOT / "CONTRIBUTING.md", "`critic.py` `turns.py` 'runtime.coordinator.turns*'") == [
        "turns.py",
        "runtime.coordinator.turns",
    ]
