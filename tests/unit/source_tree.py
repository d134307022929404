"""The source of this repository's packages, which tests of its text read and parse once."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("runtime", "services", "launcher", "sluice")  # each may import those before it
FILES = sorted(
    file.relative_to(ROOT).as_posix()
    for package in PACKAGES
    for file in (ROOT / package).rglob("*.py")
    if not file.name.endswith("_pb2.py")
)


@cache
def text(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


@cache
def nodes(file: str) -> list[ast.AST]:
    """All of a file's tree, the module first."""
    return list(ast.walk(ast.parse(text(file))))


class _Trees(Mapping[str, ast.Module]):
    """The trees of FILES, each parsed when it is first looked at."""

    def __getitem__(self, file: str) -> ast.Module:
        tree = nodes(file)[0]
        assert isinstance(tree, ast.Module)
        return tree

    def __iter__(self) -> Iterator[str]:
        return iter(FILES)

    def __len__(self) -> int:
        return len(FILES)


TREES = _Trees()


def last_name(node: ast.AST) -> str:
    """`c` of `a.b.c`, and of `c`; "" of what is neither."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def for_types(node: ast.AST) -> bool:
    """Whether it is an `if TYPE_CHECKING`: its imports are never carried out."""
    return isinstance(node, ast.If) and last_name(node.test) == "TYPE_CHECKING"


def named_by(node: ast.AST) -> Iterator[str]:
    """The modules that an import names; what `from` takes may be a module too."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0 and node.module is not None, f"line {node.lineno}: a relative import"
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def import_nodes(file: str) -> list[ast.Import | ast.ImportFrom]:
    """Those anywhere in a file, but for type checking."""
    unused = {part for node in nodes(file) if for_types(node) for each in node.body for part in ast.walk(each)}
    return [node for node in nodes(file) if isinstance(node, ast.Import | ast.ImportFrom) and node not in unused]


@cache
def imports_of(file: str) -> set[str]:
    """Every module that a file imports, by name."""
    return {name for node in import_nodes(file) for name in named_by(node)}


@cache
def loaded_by_name(file: str) -> set[str]:
    """What a file imports by `import_module` of a constant."""
    calls = (node for node in nodes(file) if isinstance(node, ast.Call) and node.args)
    called = (node for node in calls if last_name(node.func) in ("import_module", "__import__"))
    return {str(node.args[0].value) for node in called if isinstance(node.args[0], ast.Constant)}
