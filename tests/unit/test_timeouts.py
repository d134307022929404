"""Every wait has a name, in one place, and the page that lists them is true."""

from __future__ import annotations

import ast
import re

import pytest

from runtime.config import Config, Run
from services.rpc import contract
from tests.unit.timeouts_page import PAGE, ROOT, page

FOLDERS = ("runtime", "services", "launcher", "sluice")
ELSEWHERE = {"simulation", "generated"}  # seconds of a virtual clock; no code of ours
WAITS = {"wait_for", "wait", "sleep", "stop", "join", "call_later", "settimeout", "poll", "timedelta", "done_within"}
"""Calls whose number is a time."""
NAMED = re.compile(r"_?[A-Z_]*(TIMEOUT|GRACE|POLL|RETRY|DELAY|PATIENCE|REFRESH|BACKOFF|STALLED|LOOK)(, _?[A-Z_]+)* = [\d.]+")
SAID = re.compile(r"timeout\w*[:=]\d|^_?[A-Z_, ]+ = [\d., ]+  # .*\bseconds (between|that .* waits)")


def test_the_page_is_what_the_source_says() -> None:
    assert PAGE.read_text() == page(), "make timeouts"


def test_every_command_has_a_deadline_that_the_configuration_names() -> None:
    config = Config(run=Run(name="a"))
    for method in contract.METHODS.values():
        if method.deadline:
            assert method.seconds(config) > 0, method


def test_no_module_has_a_timeout_of_its_own() -> None:
    """Neither a constant that says that it is seconds to wait, nor a number or one of its constants in a call that waits."""
    found = []
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            if path.name != "timeouts.py" and not ELSEWHERE & {*path.parts}:
                found += [f"{path}:{line}" for line in own_waits(path.read_text())]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "FIRST_DELAY, LONGEST_DELAY = 0.05, 1.0",
        "INTERVAL = 5.0  # seconds between two lines",
        "SHORT = {'RES_OPTIONS': 'timeout:1 attempts:1'}",
        "time.sleep(0.05)",
        "LOOKS = 0.05; time.sleep(LOOKS)",
        "left = max(give_up - time.monotonic(), 0.1)",
        "call(timeout=max(1.5, left))",
        "work.wait(timedelta(seconds=0.001))",
        "loop.call_later(WAIT, print); WAIT = 2.0",
        "OPTIONS = (('grpc.max_reconnect_backoff_ms', 1000),)",
    ],
)
def test_a_wait_of_its_own_is_found(line: str) -> None:
    assert set(own_waits(line)) == {1}


def test_a_number_that_is_no_wait_is_not_found() -> None:
    assert own_waits("PARTS = 5; x = max(1.5, y); z = a / max(time.time() - b, 1e-3)") == []
    assert own_waits("time.sleep(timeouts.POLL); a.wait(timeout=seconds / 2); b = ('a_ms', int(s * 1000))") == []


def own_waits(text: str) -> list[int]:
    """The lines of a module that have seconds to wait."""
    tree = ast.parse(text)
    assigned = [each for each in tree.body if isinstance(each, ast.Assign) and isinstance(each.value, ast.Constant)]
    own = {name.id for each in assigned if _seconds(each.value) for name in each.targets if isinstance(name, ast.Name)}
    found = [number for number, line in enumerate(text.splitlines(), 1) if NAMED.match(line) or SAID.search(line)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (_called(node) in WAITS or _is_rest(node)):
            given = [part for one in [*node.args, *(each.value for each in node.keywords)] for part in _parts(one)]
            found += [one.lineno for one in given if _seconds(one) or (isinstance(one, ast.Name) and one.id in own)]
        found += [part.lineno for name, one in _named(node) if "timeout" in name for part in _parts(one) if _is_number(part)]
        if isinstance(node, ast.Tuple) and any(
            isinstance(one, ast.Constant) and str(one.value).endswith("_ms") for one in node.elts
        ):
            found += [node.lineno for one in node.elts if _is_number(one)]
    return found


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _is_rest(node: ast.Call) -> bool:
    """Whether it is the larger, or the smaller, of some seconds and the rest until a deadline."""
    rests = (each.right for each in ast.walk(node) if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Sub))
    clocks = (each for each in rests if isinstance(each, ast.Call) and _called(each) in ("monotonic", "time", "_clock"))
    return _called(node) in ("max", "min") and any(clocks)


def _parts(node: ast.expr) -> list[ast.expr]:
    """An argument, or what it is the larger or smaller of, or the sum of."""
    if isinstance(node, ast.Call) and _called(node) in ("max", "min", "timedelta"):
        return [part for one in [*node.args, *(each.value for each in node.keywords)] for part in _parts(one)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        return [*_parts(node.left), *_parts(node.right)]
    return [node]


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


def _seconds(node: ast.expr) -> bool:
    """A float other than 0: what is counted in whole numbers is no time."""
    return isinstance(node, ast.Constant) and isinstance(node.value, float) and node.value != 0.0
