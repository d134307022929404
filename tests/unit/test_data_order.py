"""The order of prompts over several sources: shares, passes, curriculum, and any position at hand."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime import codec
from runtime.config import Curriculum
from runtime.data.handlers import Problem
from runtime.data.order import Order, Share, turn
from runtime.data.prompts import PromptStream, StreamState
from runtime.errors import UserError

WEIGHTS = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=5)


def problems(count: int) -> list[Problem]:
    hard = np.random.default_rng(0).integers(1, 6, count)
    return [Problem(f"x:{i}", [{"role": "user", "content": f"q{i}"}], str(i), "x", float(hard[i])) for i in range(count)]


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
@settings(max_examples=60)
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
