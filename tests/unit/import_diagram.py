"""The diagram of docs/architecture.md: which package imports which, as Mermaid. `make diagram` writes it into the page.

Left out are imports for type checking alone; those of what nearly everything imports, which is the modules directly in
`runtime` and the configuration's schema; and arrows that a longer way stands for. The configuration's checks are a package of
their own here, as they look at everything.
"""

from __future__ import annotations

import ast
from functools import cache

from tests.unit.source_tree import FILES, ROOT, import_nodes, named_by

PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- imports: written by `make diagram` -->\n", "<!-- end of imports -->\n"
TOP = ("launcher", "services", "runtime")
SHARED = ("runtime", "config", "process", "telemetry")  # what everything may import


def package(module: str) -> str:
    """The package of a module as the diagram has it: "coordinator" of runtime.coordinator.buffer."""
    first, *rest = module.split(".")
    if first != "runtime":
        return first
    if not rest or not (ROOT / "runtime" / rest[0]).is_dir():
        return "runtime"
    return "config checks" if rest[0] == "config" and rest[-1].endswith("checks") else rest[0]


@cache
def arrows() -> set[tuple[str, str]]:
    found = set()
    for file in FILES:
        module = file.removesuffix(".py").replace("/", ".")
        if module.split(".")[0] in TOP:
            names = (name for node in import_nodes(file) for name in [*named_by(node)][isinstance(node, ast.ImportFrom) :])
            found |= {(package(module), package(name)) for name in names if name.split(".")[0] in TOP}
    return {(one, other) for one, other in found if one != other and not {one, other} & set(SHARED)}


def reduced(found: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Without the arrows that a longer way stands for."""
    kept = set(found)
    for arrow in sorted(found):
        if leads(kept - {arrow}, *arrow):
            kept.discard(arrow)
    return kept


def leads(found: set[tuple[str, str]], one: str, other: str) -> bool:
    """Whether some way goes from `one` to `other`."""
    seen, ahead = set(), [one]
    while ahead:
        place = ahead.pop()
        if place not in seen:
            seen.add(place)
            ahead += [to for begin, to in found if begin == place]
    return other in seen


def diagram() -> str:
    lines = ["flowchart TD"]
    lines += [f"    {_id(one)}[{one}] --> {_id(other)}[{other}]" for one, other in sorted(reduced(arrows()))]
    return "```mermaid\n" + "\n".join(lines) + "\n```\n"


def _id(name: str) -> str:
    return name.replace(" ", "_")


def written(page: str) -> str:
    """`page` with the diagram as it is now."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + diagram() + END + after


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
