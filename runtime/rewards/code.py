"""Rules that run a reply's program on tests. The expected outputs stay in this process: no program sees them.

A label has the tests in one of two forms. LiveCodeBench: a JSON list of {"input", "output", "testtype"}, with type `stdin` or
`functional`; or LiveCodeBench's packed form of such a list (base64 of zlib of a pickled text). verl's form of PRIME: a JSON
object {"inputs", "outputs", "fn_name"}."""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from msgspec import Struct

from runtime.config.sandbox import Sandbox
from runtime.rewards.rules import RULES, RewardRule, RuleContext, Screen, Value
from runtime.weights import plain_pickle

SCREENED = 32_768  # characters of a reply in which the service itself searches for a program
UNPACKED = 256 << 20  # bytes that packed tests may have
ROOM = 4096  # bytes of an output that are read beyond twice the expected output
_FENCE = re.compile(r"^[ \t]{0,3}```[ \t]*([A-Za-z0-9_+.-]*)[^\n`]*$", re.MULTILINE)

_DRIVER = Path(__file__).with_name("code_driver.py").read_text("utf-8")
LENGTH, RESULT = struct.Struct("<I"), struct.Struct("<iI")  # as in the driver

_sandbox = Sandbox()


def use(sandbox: Sandbox) -> None:
    """Run programs of this process in `sandbox`, the setting `rewards.sandbox`."""
    global _sandbox
    _sandbox = sandbox


class CodeTests(Struct, frozen=True):
    """The tests of a label. `function`: to call; "": the program reads its input. Inputs are text, or a JSON list of arguments.
    Expected values are text, or for a function any JSON value; `wrapped`: also as the first item of a list."""

    inputs: Sequence[str]
    expected: Sequence[Any]
    function: str = ""
    wrapped: bool = False


def last_program(text: str) -> str | None:
    """Return the last complete fenced block of Python, else the last fenced block of any kind; None without one."""
    last: dict[bool, str] = {}  # by whether it is Python
    opened: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        if opened is None or fence.group(1):
            opened = fence
        else:
            last[opened.group(1).lower() in ("python", "py", "python3")] = text[opened.end() + 1 : fence.start()]
            opened = None
    return last.get(True, last.get(False))


class _NoNames:
    """Refuses every reference of a pickle: packed tests are plain text."""

    def named(self, full: str) -> Any:
        raise plain_pickle.RefusedPickle(full)

    def outside(self, identity: Any) -> Any:
        raise plain_pickle.Malformed("it refers to an object outside the pickle")


def read_tests(label: str, extra: dict[str, Any]) -> CodeTests:
    """Return the tests of a label; `extra` may name the function. Raises ValueError if the tests cannot be read."""
    try:
        found = json.loads(label)
    except ValueError:
        found = json.loads(_unpacked(label))
    if isinstance(found, dict) and isinstance(found.get("inputs"), list) and isinstance(found.get("outputs"), list):
        name = _function({**extra, **found})
        inputs, expected, wrapped = found["inputs"], found["outputs"], True
    elif isinstance(found, list) and all(isinstance(test, dict) and {"input", "output"} <= test.keys() for test in found):
        inputs, expected, wrapped = [test["input"] for test in found], [test["output"] for test in found], False
        name = _function(extra) if any(test.get("testtype") == "functional" for test in found) else ""
    else:
        raise ValueError("the label has neither a list of tests nor inputs and outputs")
    if not inputs or len(inputs) != len(expected):
        raise ValueError(f"the label has {len(inputs)} inputs and {len(expected)} outputs")
    if not name:
        return CodeTests(list(map(_lines, inputs)), list(map(_lines, expected)))
    return CodeTests(list(map(_arguments, inputs)), list(map(_value, expected)), name, wrapped)


def _unpacked(label: str) -> str:
    try:
        data = zlib.decompressobj().decompress(base64.b64decode(label, validate=True), UNPACKED)
        found = plain_pickle.load(data, _NoNames(), UNPACKED // plain_pickle.MOST_BYTES)
    except (binascii.Error, zlib.error, plain_pickle.RefusedPickle, *plain_pickle.FAULTS) as error:
        raise ValueError(f"the label is neither JSON nor packed tests: {plain_pickle.line(error)}") from None
    if not isinstance(found, str):
        raise ValueError("the label's packed tests are not text")
    return found


def _function(values: dict[str, Any]) -> str:
    """Return the function's name from a row's columns. LiveCodeBench has its `metadata` as JSON text."""
    metadata = values.get("metadata")
    inner = json.loads(metadata) if isinstance(metadata, str) and metadata else metadata
    sources, names = (values, inner if isinstance(inner, dict) else {}), ("fn_name", "func_name")
    return next((str(source[name]) for source in sources for name in names if source.get(name)), "")


def _lines(value: Any) -> str:
    """Return an input as text. APPS has some inputs as lists of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _arguments(value: Any) -> str:
    """Return a function's arguments as a JSON list, from a list or from text with one JSON value a line."""
    return json.dumps([json.loads(line) for line in value.split("\n") if line] if isinstance(value, str) else value)


def _value(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def passed(tests: CodeTests, index: int, output: bytes) -> bool:
    """Return whether `output` is the expected output of test `index`."""
    expected, text = tests.expected[index], output.decode("utf-8", "replace")
    if not tests.function:
        return same_text(text, expected)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return bool(value == expected or (tests.wrapped and isinstance(expected, list) and expected and value == expected[0]))


def same_text(text: str, expected: str) -> bool:
    """Return whether the lines have the same words; numbers compare by value. White space at ends does not count."""
    ours, theirs = ([line.split() for line in each.strip().splitlines()] for each in (text, expected))
    return len(ours) == len(theirs) and all(
        len(one) == len(other) and all(map(_same_word, one, other)) for one, other in zip(ours, theirs, strict=True)
    )


def _same_word(word: str, expected: str) -> bool:
    """Compare two words. A number that is expected with a decimal point may differ by a relative 1e-5."""
    if word == expected:
        return True
    try:
        ours, theirs = Decimal(word), Decimal(expected)
        if ours == theirs:
            return True
        return not expected.lstrip("+-").isdecimal() and math.isclose(ours, theirs, rel_tol=1e-5, abs_tol=1e-8)
    except (InvalidOperation, OverflowError, ValueError):
        return False


async def verdicts(text: str, label: str, context: RuleContext) -> list[bool]:
    """Return which tests pass. Raises ValueError for a label without tests, ServiceFault if the sandbox cannot be started."""
    program, tests = last_program(text), read_tests(label, context.extra)
    if program is None:
        return [False] * len(tests.inputs)
    from runtime.sandbox import run  # loaded only where programs run

    most = ROOM + 2 * max(len(json.dumps(value)) for value in tests.expected)
    given = [tests.function, str(most), program, *tests.inputs]
    data = [part.encode("utf-8", "replace") for part in given]
    stdin = b"".join(LENGTH.pack(len(part)) + part for part in data)
    output = len(tests.inputs) * (most + RESULT.size)
    finished = await run(_sandbox, ["program.py"], source=_DRIVER, stdin=stdin, output=output)
    judged = [False] * len(tests.inputs)
    for index, (code, said) in zip(range(len(judged)), _results(finished.stdout), strict=False):
        judged[index] = not code and passed(tests, index, said)
    return judged


def _results(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the exit code and the output of each finished test. The program may have written any bytes."""
    at = 0
    while at + RESULT.size <= len(data):
        code, size = RESULT.unpack_from(data, at)
        at += RESULT.size + size
        if at > len(data):
            return
        yield code, data[at - size : at]


async def _code(text: str, label: str, context: RuleContext) -> bool:
    """Return whether the reply's last program passes all tests."""
    return all(await verdicts(text, label, context))


async def _code_share(text: str, label: str, context: RuleContext) -> float:
    """Return the share of tests that the reply's last program passes."""
    found = await verdicts(text, label, context)
    return sum(found) / len(found)


def _screen(value: Value) -> Screen:
    """Return a screen that gives `value` to a reply without a program."""
    return lambda text, label, context: value if len(text) <= SCREENED and last_program(text) is None else None


code = RULES.register("code")(RewardRule("code", _code, _screen(False), sandboxed=True))
code_share = RULES.register("code_share")(RewardRule("code_share", _code_share, _screen(0.0), sandboxed=True))


def find_rule(name: str, key: str = "") -> RewardRule:
    """Return a built-in rule, or a user's `FILE.py:NAME`. Raises UserError, with `key`, if there is none, or the file fails."""
    return RULES.find(name, key)
