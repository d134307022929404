"""Addition problems: right, split without overlap, in GSM8K's format."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from runtime.data.arithmetic import ArithmeticProblem, split, write_jsonl
from runtime.errors import ConfigError


def final_number(answer: str) -> int:
    found = re.fullmatch(r".* #### (\d+)", answer)
    assert found is not None, answer
    return int(found.group(1))


def test_every_answer_is_the_sum_and_its_steps_add_up() -> None:
    for a in range(0, 130, 3):
        for b in range(130):
            problem = ArithmeticProblem(a, b)
            assert problem.question == f"{a}+{b}="
            assert final_number(problem.answer) == a + b
            units, tens = map(int, problem.answer.split()[:2])
            assert units == a % 10 + b % 10
            assert 10 * tens + units % 10 == a + b


@pytest.mark.parametrize(
    ("a", "b", "careless"),
    [(34, 48, "12 7 #### 72"), (34, 45, "9 7 #### 79"), (10, 10, "0 2 #### 20"), (95, 7, "12 9 #### 92")],
)
def test_a_careless_answer_drops_the_carry_and_nothing_else(a: int, b: int, careless: str) -> None:
    problem = ArithmeticProblem(a, b)
    assert problem.careless_answer == careless
    assert (problem.careless_answer == problem.answer) == (problem.carry == 0)


@pytest.mark.parametrize("held_out", [0, 1, 100, 255, 256])
def test_split_holds_out_sums_together_with_their_mirror_images(held_out: int) -> None:
    train, held = split(10, 49, held_out, seed=3)
    assert len(held) == held_out
    assert len(set(train)) == len(train) and len(set(held)) == len(held)
    sums = {frozenset(p) for p in train}
    assert not sums & {frozenset(p) for p in held}
    assert len(train) + len(held) in (1600, 1599)
    assert all(10 <= operand <= 49 for p in train + held for operand in p)


def test_split_depends_on_the_seed_alone() -> None:
    assert split(10, 49, 64, seed=3) == split(10, 49, 64, seed=3)
    assert split(10, 49, 64, seed=3)[1] != split(10, 49, 64, seed=4)[1]


@pytest.mark.parametrize(("low", "high", "held_out"), [(10, 12, 9), (10, 12, 400), (20, 10, 4)])
def test_split_refuses_settings_that_leave_nothing_to_train_on(low: int, high: int, held_out: int) -> None:
    with pytest.raises(ConfigError, match=f"warmup.eval_problems: {held_out} leaves nothing.*{low} to {high}"):
        split(low, high, held_out, seed=0)


def test_jsonl_has_one_object_a_line(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    write_jsonl(path, [ArithmeticProblem(34, 48), ArithmeticProblem(10, 11)])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [
        {"question": "34+48=", "answer": "12 8 #### 82"},
        {"question": "10+11=", "answer": "1 2 #### 21"},
    ]
