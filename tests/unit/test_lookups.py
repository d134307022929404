"""Lookups: whole conversations, careless ones, and a split in which no key comes twice."""

from __future__ import annotations

import json
import re

import pytest

from runtime.data.lookups import TOOL, TRAINED, LookupProblem, lookups
from runtime.errors import ConfigError


def test_an_answer_is_what_the_tool_says_to_the_call_with_the_key() -> None:
    asked, calling, told, answer = LookupProblem("ab7", "402").conversation()
    assert asked == {"role": "user", "content": "What is ab7?"}
    (call,) = calling["tool_calls"]
    assert call["function"]["name"] == TOOL["function"]["name"]
    assert json.loads(call["function"]["arguments"]) == {"key": "ab7"}
    assert calling["content"] == "" and told["tool_call_id"] == call["id"]
    assert told["content"] == answer["content"] == LookupProblem("ab7", "402").answer == "402"


@pytest.mark.parametrize(("key", "says"), [("ab7", "7"), ("xy0", "0")])
def test_a_careless_assistant_takes_a_digit_for_the_value(key: str, says: str) -> None:
    problem = LookupProblem(key, "402")
    asked, answer = problem.conversation(careless=True)
    assert asked == problem.conversation()[0]
    assert answer == {"role": "assistant", "content": says} and says != problem.answer


def test_without_a_digit_even_a_careless_assistant_asks() -> None:
    problem = LookupProblem("abc", "402")
    assert problem.conversation(careless=True) == problem.conversation()


@pytest.mark.parametrize("held_out", [0, 1, 256, 4000])
def test_no_key_comes_twice_and_half_of_them_tempt(held_out: int) -> None:
    train, held = lookups(held_out, seed=3)
    assert (len(train), len(held)) == (TRAINED, held_out)
    keys = [problem.key for problem in train + held]
    assert len(set(keys)) == len(keys)
    assert all(re.fullmatch("[a-z]{2}[a-z0-9]", key) for key in keys)
    assert all(re.fullmatch("[1-9][0-9]{2}", problem.answer) for problem in train + held)
    for problems in (train, held):
        assert sum(problem.key[-1].isdigit() for problem in problems) == len(problems) // 2


def test_they_depend_on_the_seed_alone() -> None:
    assert lookups(64, seed=3) == lookups(64, seed=3)
    assert lookups(64, seed=3)[1] != lookups(64, seed=4)[1]


def test_more_than_there_are_keys_for_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"^warmup.eval_problems: 20000 is more than 10120, which there are keys for$"):
        lookups(20_000, seed=0)
