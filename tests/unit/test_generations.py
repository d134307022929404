"""Replies as JSON lines: their order, what is there when an evaluation is cut short, and reading them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec import structs

from runtime import config
from runtime.data.handlers import Problem
from runtime.errors import ServiceFault, UserError
from runtime.evaluation import generations
from runtime.evaluation.generations import Generation, Transcript
from runtime.types import GroupPayload, PolicyVersion, Sample, Scores

PROBLEM = Problem("f/eval:7", [{"role": "user", "content": "?"}], "42", "f/eval")


class Letters:
    """A tokenizer whose ids are characters."""

    def decode(self, ids: np.ndarray, skip_special: bool = True) -> str:
        return "".join(map(chr, ids))

    def decode_batch(self, batch: Any, skip_special: bool = True) -> list[str]:
        assert not skip_special
        return [self.decode(ids) for ids in batch]


def sample(text: str, versions: tuple[int, int] = (2, 3)) -> Sample:
    size = len(text)
    steps = np.linspace(*versions, size).round().astype(np.int64)
    return Sample(
        tokens=np.array([ord(letter) for letter in text], np.int32),
        loss_mask=(np.arange(size) < size - 1).astype(np.uint8),
        logprobs=np.where(np.arange(size) < size - 1, np.float32(-0.5), np.float32(0)),
        versions=steps,
        finish_reason="length",
    )


def part(*texts: str, values: list[float], valid: list[int], answers: list[str | None]) -> tuple[GroupPayload, Scores]:
    payload = GroupPayload.of(-1, np.array([ord("?")], np.int32), [sample(text) for text in texts])
    rules = {"mine": np.array(values, np.float32)}
    rewards = np.nan_to_num(rules["mine"] * 2)
    return payload, Scores(group_id=-1, rewards=rewards, valid=np.array(valid, np.uint8), rules=rules, answers=answers)


def test_a_reply_is_told_whole() -> None:
    parts = [
        part("four", "five", values=[0.5, np.nan], valid=[1, 0], answers=["4", None]),
        part("six", values=[0.25], valid=[1], answers=[]),
    ]
    found = generations.replies_to("set", PROBLEM, parts, config.Rule(name="rules/own.py:mine", correct=0.5), Letters())
    first, second, third = found
    assert first == Generation(
        set="set",
        problem="f/eval:7",
        sample=0,
        prompt="?",
        reply="four",
        label="42",
        answer="4",
        correct=True,
        reward=1.0,
        rules={"mine": 0.5},
        tokens=4,
        finish="length",
        versions=(str(PolicyVersion(0, 2)), str(PolicyVersion(0, 3))),
        logprob=-0.5,
    )
    assert (second.correct, second.reward, second.rules, second.answer, second.sample) == (None, None, {"mine": None}, None, 1)
    assert (third.correct, third.reward, third.answer, third.sample) == (False, 0.5, None, 2)


def test_of_an_episode_the_last_branch_is_told_and_what_the_others_say() -> None:
    rows = [sample("ask"), sample("four"), structs.replace(sample("fi"), finish_reason="stop"), sample("")]
    payload = GroupPayload.of(-1, np.array([ord("?")], np.int32), rows, [2, 1, 1])
    values = np.array([1.0, 0.0, 0.5], np.float32)
    scores = Scores(group_id=-1, rewards=values, valid=np.ones(3, np.uint8), rules={"environment": values})
    found = generations.replies_to("set", PROBLEM, [(payload, scores)], config.Rule(name="environment"), Letters())
    assert [(each.reply, each.correct, each.tokens, each.finish) for each in found] == [
        ("four", True, 4, "length"),
        ("fi", False, 2, "stop"),
        ("", False, 0, "length"),  # nobody called the model
    ]
    assert (found[2].logprob, found[2].versions) == (None, ("", ""))
    assert [each.earlier for each in found] == [["ask"], [], []]


def lines(problem: int) -> list[Generation]:
    (first,) = generations.replies_to(
        "set", PROBLEM, [part("reply", values=[1.0], valid=[1], answers=["1"])], config.Rule(name="mine"), Letters()
    )
    return [msgspec.structs.replace(first, problem=str(problem), sample=index) for index in range(2)]


def kept(path: Path) -> list[tuple[str, int]]:
    return [(each.problem, each.sample) for each in generations.read(path)]


def test_lines_stand_in_the_order_of_the_problems(tmp_path: Path) -> None:
    transcript = Transcript(tmp_path / "a.jsonl")
    transcript.add(1, lines(1))
    assert kept(tmp_path / "a.jsonl") == []
    transcript.add(0, lines(0))
    assert kept(tmp_path / "a.jsonl") == [("0", 0), ("0", 1), ("1", 0), ("1", 1)]  # before it is closed
    transcript.add(4, lines(4))
    transcript.add(3, lines(3))
    transcript.close()
    assert [problem for problem, sample in kept(tmp_path / "a.jsonl") if sample == 0] == ["0", "1", "3", "4"]


def test_a_line_that_is_still_being_written_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    transcript = Transcript(path)
    transcript.add(0, lines(0))
    transcript.close()
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:30])
    assert kept(path) == [("0", 0), ("0", 1)]
    path.write_bytes(whole + b"{}\n")
    with pytest.raises(UserError, match="not the replies of an evaluation"):
        kept(path)
    with pytest.raises(UserError, match="no such file"):
        kept(tmp_path / "none")


def test_a_folder_that_cannot_be_written_to_is_a_fault(tmp_path: Path) -> None:
    with pytest.raises(ServiceFault, match=r"coordinator: write: .*a\.jsonl"):
        Transcript(tmp_path / "none" / "a.jsonl")
