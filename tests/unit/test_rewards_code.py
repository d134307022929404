"""The rules for code, without any program being run: which block of a reply it is, what labels say, what outputs are equal."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from typing import Any

import pytest

from runtime.rewards.code import CodeTests, _screen, last_program, passed, read_tests, same_text
from runtime.rewards.rules import RuleContext


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\na\n```\nand\n```python\nb\n```", "b\n"),
        ("```py\na\n```\n```\nb\n```\n```text\nc\n```", "a\n"),
        ("```\na\n```\n```cpp\nb\n```", "b\n"),
        ("```python\na\n```\n```python\ncut off", "a\n"),
        ("```python\nnever closed\n\n```python\na\n```", "a\n"),
        ("  ```Python3 title\na ``` b\n  ```", "a ``` b\n"),
        ("print(1)", None),
        ("```python", None),
    ],
)
def test_the_program_of_a_reply(text: str, program: str | None) -> None:
    assert last_program(text) == program


def test_a_reply_without_a_program_needs_no_worker() -> None:
    assert _screen("no", "", RuleContext()) is False
    assert _screen("```\na\n```", "", RuleContext()) is None


STDIN = [{"input": "1\n", "output": "2\n", "testtype": "stdin"}, {"input": "3", "output": "4", "testtype": "stdin"}]
CALLED = [{"input": '[1, 2]\n"x"', "output": "3", "testtype": "functional"}]


def packed(value: Any) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def test_labels_of_livecodebench() -> None:
    assert read_tests(json.dumps(STDIN), {}) == CodeTests(["1\n", "3"], ["2\n", "4"])
    wanted = CodeTests(['[[1, 2], "x"]'], [3], "add")
    assert read_tests(json.dumps(CALLED), {"fn_name": "add"}) == wanted
    assert read_tests(json.dumps(CALLED), {"metadata": '{"func_name": "add"}'}) == wanted
    assert read_tests(packed(json.dumps(STDIN)), {}) == read_tests(json.dumps(STDIN), {})


def test_labels_of_prime() -> None:
    stdin = {"inputs": ["1\n", ["2", "3"]], "outputs": ["4", ["5", "6"]]}
    assert read_tests(json.dumps(stdin), {}) == CodeTests(["1\n", "2\n3"], ["4", "5\n6"])
    called = {"fn_name": "add", "inputs": [[[1, 2]], "[3]\n4"], "outputs": [3, [7]]}
    assert read_tests(json.dumps(called), {}) == CodeTests(["[[1, 2]]", "[[3], 4]"], [3, [7]], "add", wrapped=True)


class Evil:
    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('unpickled')",))


@pytest.mark.parametrize(
    ("label", "fault"),
    [
        ("5", "neither a list of tests"),
        ("no tests", "neither JSON nor packed tests"),
        ("[]", "0 inputs"),
        ('{"inputs": ["1"], "outputs": []}', "1 inputs and 0 outputs"),
        (packed(Evil()), "exec"),
        (packed(7), "no text"),
        (base64.b64encode(zlib.compress(b"\x80\x04.")).decode(), "neither JSON nor packed tests"),
    ],
)
def test_labels_without_tests(label: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        read_tests(label, {})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1 2\n3\n", "1 2\n3"),
        (" 1  2 \n", "1 2"),
        ("\n1\r\n2", "1\n2\n\n"),
        ("1.0", "1"),
        ("0.333333", "0.3333333333"),
        ("1e3", "1000.0"),
        ("YES", "YES"),
        ("", "\n"),
    ],
)
def test_outputs_that_are_the_same(text: str, expected: str) -> None:
    assert same_text(text, expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1 2", "1\n2"),
        ("1", "1\n2"),
        ("yes", "YES"),
        ("100000000001", "100000000000"),
        ("0.33", "0.3333333333"),
        ("nan", "1.0"),
        ("sNaN", "1.0"),
        ("1", "one"),
        ("", "0"),
    ],
)
def test_outputs_that_differ(text: str, expected: str) -> None:
    assert not same_text(text, expected)


def test_values_of_functions() -> None:
    plain, wrapped = (CodeTests(["[]"], [[1, 2]], "f", wrapped) for wrapped in (False, True))
    assert passed(plain, 0, b"[1, 2]")
    assert not passed(plain, 0, b"1")
    assert passed(wrapped, 0, b"1")
    assert not passed(wrapped, 0, b"2")
    assert not passed(plain, 0, b"")
    assert not passed(plain, 0, b"[" * 100_000)
