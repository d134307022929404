"""Held-out problems are kept apart from those to train on."""

from __future__ import annotations

import logging

import pytest

from runtime.data.handlers import Problem
from runtime.data.overlap import keep_apart, overlap
from runtime.errors import UserError


def of(*questions: str, name: str = "a/b") -> list[Problem]:
    return [
        Problem(f"{name}:{i}", [{"role": "system", "content": "s"}, {"role": "user", "content": text}], str(i), name)
        for i, text in enumerate(questions, 1)
    ]


def test_problems_are_compared_without_whitespace() -> None:
    train = of("What is $1 + 1$?", "Two\n\nlines", "once", "once")
    held_out = of("What is $1+1$?", " Two lines\t", "what is $1+1$?", "another", "once", name="c/d")
    assert [problem.id for problem in overlap(train, held_out)] == ["c/d:1", "c/d:2", "c/d:5"]
    assert overlap(held_out[3:4], train) == []


def test_training_on_held_out_problems_is_refused_with_their_number(caplog: pytest.LogCaptureFixture) -> None:
    train, held_out = of("one", "two " * 40, "three"), of("two " * 40, "four", "one", name="c/d")
    with pytest.raises(UserError) as error:
        keep_apart(train, held_out, "data.eval", allowed=False)
    assert str(error.value).startswith("data.train: 2 of the 3 problems of data.eval are in it too, first c/d:1 ('two two two")
    assert str(error.value).endswith("…'); leave one of the files out, or set data.allow_overlap")
    assert "\n" not in str(error.value)
    keep_apart(train, held_out[1:2], "data.eval", allowed=False)
    with caplog.at_level(logging.WARNING, "sluice"):
        keep_apart(train, held_out, "data.eval", allowed=True)
    assert "2 of the 3 problems of data.eval" in caplog.text
