"""Every wait has a name, in one place, and the page that lists them is true."""

from __future__ import annotations

import ast
import re

from runtime.config import Config, Run
from services.rpc import contract
from tests.unit.timeouts_page import PAGE, ROOT, page

FOLDERS = ("runtime", "services", "launcher")
WAITS = {"wait_for", "wait", "sleep", "stop", "join"}  # calls whose number is a time


def test_the_page_is_what_the_source_says() -> None:
    assert PAGE.read_text() == page(), "make timeouts"


def test_every_command_has_a_deadline_that_the_configuration_names() -> None:
    config = Config(run=Run(name="a"))
    for method in contract.METHODS.values():
        if method.deadline:
            assert method.seconds(config) > 0, method


def test_no_module_has_a_timeout_of_its_own() -> None:
    """Neither a constant that says that it is seconds to wait, nor a number in a call that waits."""
    found = []
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            if path.name == "timeouts.py" or "generated" in path.parts:
                continue
            text = path.read_text()
            found += [
                f"{path}: {line}"
                for line in text.splitlines()
                if re.match(r"_?[A-Z_]*(TIMEOUT|GRACE|POLL|RETRY)\w* = [\d.]+", line)
            ]
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in WAITS:
                    given = [*node.args, *(one.value for one in node.keywords)]
                    found += [f"{path}:{node.lineno}" for one in given if isinstance(one, ast.Constant) and _seconds(one.value)]
                found += [f"{path}:{one.lineno}" for name, one in _named(node) if "timeout" in name and _is_number(one)]
    assert found == []


def _named(node: ast.AST) -> list[tuple[str, ast.expr]]:
    """The arguments that a call gives by name, or a function's parameters, with their defaults."""
    if isinstance(node, ast.Call):
        return [(each.arg or "", each.value) for each in node.keywords]
    if isinstance(node, ast.arguments):
        plain = [*node.posonlyargs, *node.args]
        pairs = [
            *zip(plain[len(plain) - len(node.defaults) :], node.defaults, strict=True),
            *zip(node.kwonlyargs, node.kw_defaults, strict=True),
        ]
        return [(parameter.arg, default) for parameter, default in pairs if default is not None]
    return []


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and node.value not in (0, 1)


def _seconds(value: object) -> bool:
    """A float other than 0: what is counted in whole numbers is no time."""
    return isinstance(value, float) and value != 0.0
