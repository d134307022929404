"""The order of prompts: every pass a permutation, shares of sources, a curriculum, any position at hand, exact resumption."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime import codec
from runtime.config import Curriculum
from runtime.data.handlers import Problem, ProblemSet
from runtime.data.order import Order, Share, turn
from runtime.data.prompts import PromptStream, StreamState, group_seed, tokenise
from runtime.errors import UserError

# Written down once: a checkpoint of today must resume under any later numpy.
GOLDEN_ORDER = [2, 4, 7, 3, 5, 0, 6, 1, 5, 0, 6, 7, 4, 1, 3, 2]
GOLDEN_SEED = 6414062456931889301


def problems(count: int) -> list[Problem]:
    """The question of each has as many words as its number."""
    return [Problem(f"x:{i}", [{"role": "user", "content": "w " * i}], str(i), "x", 1.0 + i * i % 5) for i in range(count)]


def test_every_pass_is_a_permutation_of_its_own() -> None:
    stream = PromptStream(problems(100), seed=1)
    passes = [[stream.draw().index for _ in range(100)] for _ in range(3)]
    assert all(sorted(each) == list(range(100)) for each in passes)
    assert passes[0] != passes[1] != passes[2] != sorted(passes[2])
    assert [PromptStream(problems(100), seed=2).index(i) for i in range(100)] != passes[0]


def test_shuffles_are_uniform() -> None:
    found = problems(4)
    places = Counter(PromptStream(found, seed=seed).index(0) for seed in range(4000))
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
    assert len(msgspec.msgpack.encode(PromptStream(problems(10) * 1000, seed=1).state())) < 200


# ------------------------------------------------------------------------------------------------ several sources

WEIGHTS = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=5)


@given(WEIGHTS, st.integers(0, 10**9))
def test_every_position_belongs_to_one_source_and_shares_are_kept(weights: list[float], start: int) -> None:
    exact = [Fraction(str(weight)) for weight in weights]
    before = Counter(first_places(exact, start))
    for position in range(start, start + 50):
        source, place = turn(position, exact)
        assert place == before[source]  # no place is left out and none served twice
        before[source] += 1
        total = position + 1
        for index, weight in enumerate(exact):
            assert abs(before[index] - total * weight / sum(exact)) <= index + 1


def first_places(weights: list[Fraction], start: int) -> dict[int, int]:
    """Where each source stands at `start`: the next place that it is given."""
    found: dict[int, int] = {}
    position = start
    while len(found) < len(weights):
        source, place = turn(position, weights)
        found.setdefault(source, place)
        position += 1
    return found


def test_three_sources_have_their_shares_from_the_start() -> None:
    order = Order([Share(10, 1), Share(20, 2), Share(5, 1)], seed=3, shuffle=True)
    drawn = [order.index(position) for position in range(400)]
    sources = Counter("a" if index < 10 else "b" if index < 30 else "c" for index in drawn)
    assert sources == {"a": 100, "b": 200, "c": 100}
    assert all(len({*drawn[i : i + 4]} & set(range(10))) == 1 for i in range(0, 400, 4))  # evenly, not in lumps
    own = [index for index in drawn if 10 <= index < 30]
    assert all(sorted(own[i : i + 20]) == list(range(10, 30)) for i in range(0, 200, 20))  # passes of its own
    assert own[:20] != own[20:40]


def test_sources_are_shuffled_apart() -> None:
    order = Order([Share(50), Share(50)], seed=3, shuffle=True)
    drawn = [order.index(position) for position in range(100)]
    first, second = [i for i in drawn if i < 50], [i - 50 for i in drawn if i >= 50]
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second


def test_a_curriculum_goes_from_easy_to_hard_in_its_passes() -> None:
    found = problems(200)
    stream = PromptStream(found, seed=5, curriculum=Curriculum(passes=2))
    levels = [[stream.at(position).difficulty for position in range(200 * epoch, 200 * (epoch + 1))] for epoch in range(3)]
    assert levels[0] == levels[1] == sorted(levels[0])
    assert levels[2] != sorted(levels[2])
    orders = [[stream.index(position) for position in range(200 * epoch, 200 * (epoch + 1))] for epoch in range(3)]
    assert all(sorted(order) == list(range(200)) for order in orders)
    assert orders[0] != orders[1]  # equals are shuffled
    assert orders[2] == [PromptStream(found, seed=5).index(position) for position in range(400, 600)]
    always = PromptStream(found, seed=5, curriculum=Curriculum(passes=0))
    assert [always.at(position).difficulty for position in range(1000, 1200)] == sorted(levels[0])
    plain = PromptStream(found, seed=5, shuffle=False, curriculum=Curriculum())
    assert [plain.index(position) for position in range(200)] == sorted(range(200), key=lambda index: found[index].difficulty)


@given(
    weights=st.lists(st.floats(0.1, 10.0), min_size=1, max_size=4),
    steps=st.lists(st.sampled_from(["draw", "return"]), max_size=60),
    curriculum=st.sampled_from([None, Curriculum(passes=1)]),
    seed=st.integers(0, 2**32),
)
def test_a_stream_resumes_exactly_from_any_point(
    weights: list[float], steps: list[str], curriculum: Curriculum | None, seed: int
) -> None:
    found = problems(5 * len(weights))
    shares = [Share(5, weight) for weight in weights]
    stream = PromptStream(found, seed, True, shares, curriculum)
    taken: list[int] = []
    for step in steps:
        if step == "return" and taken:
            stream.give_back(taken.pop())
        else:
            taken.append(stream.draw().index)
    saved = codec.encode(stream.state())
    expected = [stream.draw() for _ in range(30)]
    resumed = PromptStream(found, seed, True, shares, curriculum)
    resumed.restore(codec.decode(StreamState, saved))
    assert [resumed.draw() for _ in range(30)] == expected


def test_another_mixture_or_curriculum_is_refused() -> None:
    found = problems(10)
    shares = [Share(4, 1.0), Share(6, 2.0)]
    state = PromptStream(found, 1, True, shares).state()
    with pytest.raises(UserError, match=r"each source is 4 · 1, 6 · 3, but the run to resume has 4 · 1, 6 · 2: prompts would"):
        PromptStream(found, 1, True, [Share(4, 1.0), Share(6, 3.0)]).restore(state)
    with pytest.raises(UserError, match="each source is one source, but the run to resume has 4 · 1, 6 · 2"):
        PromptStream(found, 1).restore(state)
    with pytest.raises(UserError, match=r"data\.curriculum is of 1 passes by 'difficulty', but the run to resume has none"):
        PromptStream(found, 1, True, shares, Curriculum()).restore(state)
    harder = [Problem(p.id, p.messages, p.label, p.source, p.difficulty + 1) for p in found]
    with pytest.raises(UserError, match="fingerprint"):
        PromptStream(harder, 1, curriculum=Curriculum()).restore(PromptStream(found, 1, curriculum=Curriculum()).state())


def test_the_state_of_an_older_checkpoint_is_taken() -> None:
    state = codec.decode(dict, codec.encode(PromptStream(problems(6), 1).state()))
    older = codec.encode({key: value for key, value in state.items() if key not in ("shares", "curriculum")})
    stream = PromptStream(problems(6), 1)
    stream.restore(codec.decode(StreamState, older))
    with pytest.raises(UserError, match="each source"):
        PromptStream(problems(6), 1, True, [Share(3), Share(3)]).restore(codec.decode(StreamState, older))
