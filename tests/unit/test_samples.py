"""`sluice samples` over a ledger: which samples are shown, and what became of their groups."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from launcher.commands import samples
from runtime import codec, config
from runtime.config import loading
from runtime.coordinator.buffer import Buffer
from runtime.coordinator.group_pipeline import NO_SIGNAL
from runtime.data.handlers import Problem
from runtime.errors import UserError
from runtime.evaluation import generations
from runtime.evaluation import results as evaluation
from runtime.evaluation.generations import Transcript
from runtime.ledger.journal import LedgerWriter
from runtime.ledger.states import Mark
from runtime.models.tiny_model import write_tokenizer
from runtime.types import GeneratedGroup, GroupPayload, Outcomes, PolicyVersion, Sample, Scores, TurnReward
from tests.unit.test_buffer import ticket


def letters(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def sample(text: str, mask: np.ndarray) -> Sample:
    logprobs, versions = np.float32(-0.5) * mask.astype(np.float32), np.zeros(len(mask), np.int64)
    return Sample(tokens=letters(text), loss_mask=mask, logprobs=logprobs, versions=versions, finish_reason="stop")


def group(payload: GroupPayload, lengths: list[int]) -> GeneratedGroup:
    counts: dict[str, Any] = {"prompt_tokens": 4, "response_tokens": lengths, "truncated": 0}
    versions = {"oldest": PolicyVersion(), "newest": PolicyVersion()}
    return GeneratedGroup(group_id=payload.group_id, payload=codec.encode(payload), **counts, **versions)


def generated(group_id: int, *replies: str) -> GeneratedGroup:
    found = [sample(reply, np.ones(len(reply), np.uint8)) for reply in replies]
    return group(GroupPayload.of(group_id, letters("2+2="), found), list(map(len, replies)))


def written(folder: Path, keep: Callable[[Buffer], None]) -> Path:
    """The folder of a run whose ledger has what `keep` does to its buffer."""
    write_tokenizer(folder)
    settings = config.Config(run=config.Run(name="a"), model=config.Model(path=str(folder)))
    (folder / "config.yaml").write_text(loading.to_yaml(settings))

    async def write() -> None:
        ledger = await LedgerWriter.open(folder / "ledger", 1 << 20)
        keep(Buffer(needs=Mark.SCORED, groups_per_step=2, staleness=0, journal=ledger, clock=time.time))
        await ledger.close()

    asyncio.run(write())
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run with one group that was dropped for want of signal, and one that is ready."""

    def keep(buffer: Buffer) -> None:
        for group_id, replies in enumerate((("5", "6"), ("4", "5"))):
            buffer.admit(ticket(group_id))
            buffer.dispatch(group_id, "rollout-0")
            buffer.generated(generated(group_id, *replies))
            rewards = np.array([reply == "4" for reply in replies], np.float32)
            buffer.scored(Scores(group_id=group_id, rewards=rewards, valid=np.ones(2, np.uint8)))
        buffer.drop(0, NO_SIGNAL)

    return written(tmp_path, keep)


def options(run: Path, *states: str, jsonl: bool, **chosen: Any) -> argparse.Namespace:
    plain: dict[str, Any] = {"step": None, "reward": None, "limit": 0, "eval": False, "group": None, "state": list(states)}
    return argparse.Namespace(run=run, jsonl=jsonl, **plain | chosen)


def rows_of(capsys: pytest.CaptureFixture[str], run: Path, *states: str, **chosen: Any) -> list[dict[str, Any]]:
    samples.run(options(run, *states, jsonl=True, **chosen))
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_dropped_groups_are_shown_with_the_reason(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    rows = rows_of(capsys, run, "dropped")
    assert [(row["group"], row["reply"], row["reward"]) for row in rows] == [(0, "5", 0.0), (0, "6", 0.0)]
    assert {(row["state"], row["why"]) for row in rows} == {("dropped", NO_SIGNAL)}
    rows = rows_of(capsys, run, "ready")
    assert [(row["group"], row["state"], row["why"]) for row in rows] == [(1, "ready", None)] * 2
    samples.run(options(run, "dropped", jsonl=False))
    assert "dropped: no signal" in capsys.readouterr().out


PLAYED = (
    (1, (("<sum>", 1), ("tool: 5\x1b[2J", 0), ("It is 5", 1))),
    (2, (("look", 1), ("⟧up", 0))),
    (2, (("look⟧up", 0), ("6", 1))),
)  # whose branch, and who said what


@pytest.fixture
def played(tmp_path: Path) -> Path:
    """The folder of a run with one group of two episodes, the second of two branches."""
    rows = []
    for _, parts in PLAYED:
        mask = np.repeat([trained for _, trained in parts], [len(text.encode()) for text, _ in parts]).astype(np.uint8)
        rows.append(sample("".join(text for text, _ in parts), mask))
    payload = GroupPayload.of(0, letters("2+2="), rows, [1, 2], [TurnReward(0, 4, 0.25)])
    outcomes = Outcomes(environment="game", reasons=["completed", "left out: it broke"], turns=[2, 2])
    header = structs.replace(group(payload, [1, 1, 1]), rewards=[1.0, float("nan")], outcomes=outcomes)
    given: dict[str, Any] = {"rewards": np.array([1, 0], np.float32), "valid": np.array([1, 0], np.uint8)}

    def keep(buffer: Buffer) -> None:
        buffer.admit(ticket(0))
        buffer.dispatch(0, "gateway-0")
        buffer.generated(header)
        buffer.scored(Scores(group_id=0, rules={"environment": np.array([1.0, np.nan], np.float32)}, **given))

    return written(tmp_path, keep)


def test_branches_are_told_with_what_is_trained_in_each(played: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(capsys, played)
    assert [(row["sample"], row["branch"], row["valid"], row["rules"]) for row in rows] == [
        (0, 0, True, {"environment": 1.0}),
        (1, 0, False, {"environment": None}),
        (1, 1, False, {"environment": None}),
    ]
    assert [row["reply"] for row in rows] == ["".join(text for text, _ in parts) for _, parts in PLAYED]
    assert [[(part["text"], part["trained"]) for part in row["parts"]] for row in rows] == [
        [(text, bool(trained)) for text, trained in parts] for _, parts in PLAYED
    ]
    assert [part["reward"] for part in rows[0]["parts"]] == [0.25, None, None]
    assert [row["outcome"] for row in rows] == ["completed", "left out: it broke", "left out: it broke"]


def test_a_conversation_is_shown_with_its_sides_told_apart(
    played: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    samples.run(options(played, jsonl=False))
    out = capsys.readouterr().out
    assert "<sum> ⟦reward 0.25⟧⟦tool: 5\\x1b[2J⟧It is 5" in out
    assert "⟦look⟧up⟧6" in out
    assert [line.split()[1] for line in out.splitlines() if line.startswith("│")] == ["0.0", "1.0", "1.1"]
    assert "⟦ ⟧: not trained in this branch" in out
    assert "episode 1: left out: it broke" in out and "episode 0" not in out


@pytest.fixture
def evaluated(tmp_path: Path) -> Path:
    """The folder of a run that was evaluated after steps 0 and 20, on two problems of two samples."""
    for step in (0, 20):
        folder = evaluation.folder_for(tmp_path, step)
        folder.mkdir(parents=True)
        transcript = Transcript(folder / "held_out.jsonl")
        for problem in range(2):
            payload = codec.decode(GroupPayload, generated(-1, "5", "6").payload)
            rewards = np.array([problem, 0.5], np.float32)
            scores = Scores(group_id=-1, rewards=rewards, valid=np.array([1, problem], np.uint8), rules={"gsm8k": rewards})
            asked = Problem(f"e:{problem}", [], "5", "e")
            transcript.add(
                problem, generations.replies_to("held_out", asked, [(payload, scores)], config.Rule(name="gsm8k"), Text())
            )
        transcript.close()
    return tmp_path


class Text:
    def decode(self, ids: np.ndarray, skip_special: bool = True) -> str:
        return bytes(ids.tolist()).decode()

    def decode_batch(self, batch: Sequence[np.ndarray], skip_special: bool = True) -> list[str]:
        return [self.decode(ids) for ids in batch]


def test_replies_of_evaluations_are_chosen_by_step_reward_and_number(
    evaluated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_of(capsys, evaluated, eval=True)
    assert [(row["step"], row["group"], row["sample"]) for row in rows] == [
        (step, f"e:{problem}", index) for step in (0, 20) for problem in (0, 1) for index in (0, 1)
    ]
    first, second = rows[:2]
    values = tuple(first[key] for key in ("state", "prompt", "reply", "reward", "valid"))
    assert values == ("evaluated", "2+2=", "5", 0.0, True)
    assert (second["reward"], second["valid"], second["rules"]) == (None, False, {"gsm8k": 0.5})
    assert {row["step"] for row in rows_of(capsys, evaluated, eval=True, step="1:")} == {20}
    assert {row["group"] for row in rows_of(capsys, evaluated, eval=True, reward="0.75:0.75")} == {
        "e:1"
    }  # the mean of 1 and 0.5
    assert {row["group"] for row in rows_of(capsys, evaluated, eval=True, reward=":0")} == {
        "e:0"
    }  # of 0 alone, the other has none
    assert len(rows_of(capsys, evaluated, eval=True, limit=3)) == 6
    with pytest.raises(UserError, match="no evaluation"):
        rows_of(capsys, evaluated / "none", eval=True)


def test_all_branches_of_an_evaluated_episode_are_shown(
    evaluated: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    (file,) = evaluation.folder_for(evaluated, 20).glob("*.jsonl")
    first, *_ = generations.read(file)
    transcript = Transcript(file)
    transcript.add(0, [structs.replace(first, earlier=["before"], outcome="max_turns")])
    transcript.close()
    (row,) = rows_of(capsys, evaluated, eval=True, step="20")
    assert (row["sample"], row["branch"], row["earlier"], row["outcome"]) == (0, 1, ["before"], "max_turns")
    samples.run(options(evaluated, jsonl=False, eval=True, step="20"))
    out = capsys.readouterr().out
    assert [line.split()[1:4:2] for line in out.splitlines() if line.startswith("│")] == [["0.0", "before"], ["0.1", "5"]]
    assert "episode 0: max_turns" in out


def test_what_can_choose_nothing_is_refused_and_nothing_chosen_is_said(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for chosen, told in (
        ({"limit": -1}, "^--limit: -1 is negative"),
        ({"step": "5:2"}, "^--step: '5:2' ends before it begins"),
    ):
        with pytest.raises(UserError, match=told):
            samples.run(options(run, jsonl=True, **chosen))
    with pytest.raises(UserError, match=r"not a run's folder: config\.yaml is not in it$"):
        samples.run(options(tmp_path / "none", jsonl=True))
    for jsonl in (True, False):
        samples.run(options(run, jsonl=jsonl, group=999))
        told = "no samples here, or none that the options select; steps are counted from 0\n"
        assert capsys.readouterr() == ("", told)
