"""The prompt stream: every epoch is a permutation, every position is computable, a resumed stream goes on exactly."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest

from runtime import codec
from runtime.data.handlers import Problem, ProblemSet
from runtime.data.prompts import PromptStream, StreamState, group_seed, tokenise
from runtime.errors import UserError

# Written down once: a checkpoint of today must resume under any later numpy.
GOLDEN_ORDER = [2, 4, 7, 3, 5, 0, 6, 1, 5, 0, 6, 7, 4, 1, 3, 2]
GOLDEN_SEED = 6414062456931889301


def problems(count: int) -> list[Problem]:
    return [Problem(f"x:{i}", [{"role": "user", "content": "w " * i}], str(i), "x") for i in range(count)]


def test_every_pass_is_a_permutation_of_its_own() -> None:
    stream = PromptStream(problems(100), seed=1)
    passes = [[stream.draw().index for _ in range(100)] for _ in range(3)]
    assert all(sorted(each) == list(range(100)) for each in passes)
    assert passes[0] != passes[1] != passes[2] != sorted(passes[2])
    assert [PromptStream(problems(100), seed=2).index(i) for i in range(100)] != passes[0]


def test_shuffles_are_uniform() -> None:
    places = Counter(PromptStream(problems(4), seed=seed).index(0) for seed in range(4000))
    assert all(abs(count - 1000) < 130 for count in places.values())  # 4.7 standard deviations


def test_positions_are_pure_in_any_order() -> None:
    stream = PromptStream(problems(7), seed=3)
    drawn = [stream.draw().index for _ in range(50)]
    other = PromptStream(problems(7), seed=3)
    assert [other.index(i) for i in reversed(range(50))] == drawn[::-1]
    assert other.at(49) == other.problems[drawn[49]]


def test_the_order_is_the_same_in_every_release() -> None:
    stream = PromptStream(problems(8), seed=1234)
    assert [stream.index(i) for i in range(16)] == GOLDEN_ORDER
    assert group_seed(1234, 5) == GOLDEN_SEED


def test_without_shuffle_the_order_is_the_file_s() -> None:
    stream = PromptStream(problems(3), seed=1, shuffle=False)
    assert [stream.draw().index for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_returned_prompts_come_first_with_a_new_ordinal_and_seed() -> None:
    stream = PromptStream(problems(10), seed=1)
    first, second, third = (stream.draw() for _ in range(3))
    stream.give_back(second.index)
    stream.give_back(first.index)
    again = [stream.draw() for _ in range(3)]
    assert [draw.index for draw in again] == [second.index, first.index, stream.index(3)]
    assert [draw.ordinal for draw in again] == [3, 4, 5]
    assert len({draw.seed for draw in (first, second, third, *again)}) == 6
    with pytest.raises(ValueError, match="10 of 10"):
        stream.give_back(10)


def test_a_restored_stream_goes_on_as_if_never_stopped() -> None:
    stream = PromptStream(problems(10), seed=1)
    for _ in range(17):
        draw = stream.draw()
    stream.give_back(draw.index)
    saved = codec.encode(stream.state())
    expected = [stream.draw() for _ in range(25)]
    resumed = PromptStream(problems(10), seed=1)
    resumed.restore(codec.decode(StreamState, saved))
    assert [resumed.draw() for _ in range(25)] == expected


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"seed": 2}, "run.seed is 2, but the run to resume has 1"),
        ({"shuffle": False}, "data.shuffle is False"),
        ({"problems": problems(9)}, "number of problems is 9"),
        ({"problems": problems(10)[::-1]}, "fingerprint of the problems"),
    ],
)
def test_another_order_of_prompts_is_refused(changed: dict[str, Any], key: str) -> None:
    state = PromptStream(problems(10), seed=1).state()
    with pytest.raises(UserError, match=key):
        PromptStream(**{"problems": problems(10), "seed": 1, **changed}).restore(state)


def test_group_seeds_are_distinct_and_fit_int64() -> None:
    seeds = [group_seed(run, ordinal) for run in (0, 1, 2**31) for ordinal in range(2000)]
    assert len(set(seeds)) == 6000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert np.std(np.array(seeds, float) / 2**63) == pytest.approx(12**-0.5, abs=0.01)


class Words:
    """A tokenizer of one token per word."""

    def encode_chats(self, conversations: list[list[dict[str, str]]]) -> list[np.ndarray]:
        return [np.arange(len(messages[0]["content"].split()), dtype=np.int32) for messages in conversations]


def test_long_prompts_are_dropped_and_counted() -> None:
    found = ProblemSet(problems=problems(6), rows=8, dropped={"null label": 2})
    prompts = tokenise(found, Words(), max_prompt_tokens=3)  # type: ignore[arg-type]
    assert [problem.label for problem in prompts.problems] == ["0", "1", "2", "3"]
    assert [len(ids) for ids in prompts.tokens] == [0, 1, 2, 3]
    assert prompts.report() == "8 rows, 4 problems (dropped: 2 null label, 2 prompt over 3 tokens)"
    long = ProblemSet(problems=problems(6)[4:], rows=2)
    with pytest.raises(UserError, match=r"^data\.eval: no prompt is left"):
        tokenise(long, Words(), max_prompt_tokens=3, key="data.eval")  # type: ignore[arg-type]


def test_state_is_small() -> None:
    assert len(msgspec.msgpack.encode(PromptStream(problems(10_000), seed=1).state())) < 200


def test_data_and_rewards_load_neither_torch_nor_transformers() -> None:
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for modules, heavy in (
        ("runtime.data.prompts, runtime.rewards.scorer", {"torch", "transformers"}),
        ("runtime.rewards.worker, runtime.rewards.catalogue", {"torch", "transformers", "numpy", "tokenizers", "jinja2"}),
    ):
        code = f"import sys, {modules}; print(*sorted({heavy} & set(sys.modules)))"
        command = [sys.executable, "-c", code]
        loaded = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout
        assert loaded.strip() == ""
