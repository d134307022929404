"""`sluice samples` over a ledger: which samples are shown, and what became of their groups."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
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


def generated(group_id: int, *replies: str) -> GeneratedGroup:
    found = [
        Sample(
            tokens=np.frombuffer(reply.encode(), np.uint8).astype(np.int32),
            loss_mask=np.ones(len(reply), np.uint8),
            logprobs=np.full(len(reply), -0.5, np.float32),
            versions=np.zeros(len(reply), np.int64),
            finish_reason="stop",
        )
        for reply in replies
    ]
    prompt = np.frombuffer(b"2+2=", np.uint8).astype(np.int32)
    return GeneratedGroup(
        group_id=group_id,
        prompt_tokens=4,
        response_tokens=[len(reply) for reply in replies],
        truncated=0,
        oldest=PolicyVersion(),
        newest=PolicyVersion(),
        payload=codec.encode(GroupPayload.of(group_id, prompt, found)),
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run with one group that was dropped for want of signal, and one that is ready."""
    write_tokenizer(tmp_path)
    settings = config.Config(run=config.Run(name="a"), model=config.Model(path=str(tmp_path)))
    (tmp_path / "config.yaml").write_text(loading.to_yaml(settings))

    async def write() -> None:
        ledger = await LedgerWriter.open(tmp_path / "ledger", 1 << 20)
        buffer = Buffer(needs=Mark.SCORED, groups_per_step=2, staleness=0, journal=ledger, clock=time.time)
        for group_id, replies in enumerate((("5", "6"), ("4", "5"))):
            buffer.admit(ticket(group_id))
            buffer.dispatch(group_id, "rollout-0")
            buffer.generated(generated(group_id, *replies))
            rewards = np.array([reply == "4" for reply in replies], np.float32)
            buffer.scored(Scores(group_id=group_id, rewards=rewards, valid=np.ones(2, np.uint8)))
        buffer.drop(0, NO_SIGNAL)
        await ledger.close()

    asyncio.run(write())
    return tmp_path


def options(run: Path, *states: str, jsonl: bool) -> argparse.Namespace:
    return argparse.Namespace(run=run, step=None, reward=None, limit=0, eval=False, group=None, state=list(states), jsonl=jsonl)


def test_dropped_groups_are_shown_with_the_reason(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples.run(options(run, "dropped", jsonl=True))
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["group"], row["reply"], row["reward"]) for row in rows] == [(0, "5", 0.0), (0, "6", 0.0)]
    assert {(row["state"], row["why"]) for row in rows} == {("dropped", NO_SIGNAL)}
    samples.run(options(run, "ready", jsonl=True))
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["group"], row["state"], row["why"]) for row in rows] == [(1, "ready", None)] * 2


def test_the_table_says_it_too(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
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
    write_tokenizer(tmp_path)
    settings = config.Config(run=config.Run(name="a"), model=config.Model(path=str(tmp_path)))
    (tmp_path / "config.yaml").write_text(loading.to_yaml(settings))
    rows = []
    for _, parts in PLAYED:
        tokens = [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text, _ in parts]
        mask = np.repeat([trained for _, trained in parts], list(map(len, tokens))).astype(np.uint8)
        whole = np.concatenate(tokens)
        rows.append(
            Sample(
                tokens=whole,
                loss_mask=mask,
                logprobs=np.float32(-0.5) * mask.astype(np.float32),
                versions=np.zeros(len(whole), np.int64),
                finish_reason="stop",
            )
        )
    payload = GroupPayload.of(0, np.frombuffer(b"2+2=", np.uint8).astype(np.int32), rows, [1, 2], [TurnReward(0, 4, 0.25)])
    outcomes = Outcomes(environment="game", reasons=["completed", "left out: it broke"], turns=[2, 2])
    header = structs.replace(
        generated(0, "a", "b", "c"), rewards=[1.0, float("nan")], outcomes=outcomes, payload=codec.encode(payload)
    )

    async def write() -> None:
        ledger = await LedgerWriter.open(tmp_path / "ledger", 1 << 20)
        buffer = Buffer(needs=Mark.SCORED, groups_per_step=2, staleness=0, journal=ledger, clock=time.time)
        buffer.admit(ticket(0))
        buffer.dispatch(0, "gateway-0")
        buffer.generated(header)
        values = np.array([1.0, np.nan], np.float32)
        buffer.scored(
            Scores(
                group_id=0,
                rewards=np.array([1, 0], np.float32),
                valid=np.array([1, 0], np.uint8),
                rules={"environment": values},
            )
        )
        await ledger.close()

    asyncio.run(write())
    return tmp_path


def test_branches_are_told_with_what_is_trained_in_each(played: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples.run(options(played, jsonl=True))
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
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


def shown(run: Path, capsys: pytest.CaptureFixture[str], **chosen: Any) -> list[dict[str, Any]]:
    found = options(run, jsonl=True)
    found.__dict__.update(eval=True, **chosen)
    samples.run(found)
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_replies_of_evaluations_are_chosen_by_step_reward_and_number(
    evaluated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = shown(evaluated, capsys)
    assert [(row["step"], row["group"], row["sample"]) for row in rows] == [
        (step, f"e:{problem}", index) for step in (0, 20) for problem in (0, 1) for index in (0, 1)
    ]
    first, second = rows[:2]
    assert (first["state"], first["prompt"], first["reply"], first["reward"], first["valid"]) == (
        "evaluated",
        "2+2=",
        "5",
        0.0,
        True,
    )
    assert (second["reward"], second["valid"], second["rules"]) == (None, False, {"gsm8k": 0.5})
    assert {row["step"] for row in shown(evaluated, capsys, step="1:")} == {20}
    assert {row["group"] for row in shown(evaluated, capsys, reward="0.75:0.75")} == {"e:1"}  # the mean of 1 and 0.5
    assert {row["group"] for row in shown(evaluated, capsys, reward=":0")} == {"e:0"}  # of 0 alone, the other has none
    assert len(shown(evaluated, capsys, limit=3)) == 6
    with pytest.raises(UserError, match="no evaluation"):
        shown(evaluated / "none", capsys)


def test_all_branches_of_an_evaluated_episode_are_shown(
    evaluated: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    (file,) = evaluation.folder_for(evaluated, 20).glob("*.jsonl")
    first, *_ = generations.read(file)
    transcript = Transcript(file)
    transcript.add(0, [structs.replace(first, earlier=["before"], outcome="max_turns")])
    transcript.close()
    (row,) = shown(evaluated, capsys, step="20")
    assert (row["sample"], row["branch"], row["earlier"], row["outcome"]) == (0, 1, ["before"], "max_turns")
    table = options(evaluated, jsonl=False)
    table.__dict__.update(eval=True, step="20")
    samples.run(table)
    out = capsys.readouterr().out
    assert [line.split()[1:4:2] for line in out.splitlines() if line.startswith("│")] == [["0.0", "before"], ["0.1", "5"]]
    assert "episode 0: max_turns" in out


@pytest.mark.parametrize(
    ("chosen", "told"),
    [
        ({"limit": -1}, "^--limit: -1 is negative"),
        ({"step": "5:2"}, "^--step: '5:2' ends before it begins"),
    ],
)
def test_an_option_that_can_choose_nothing_is_refused(run: Path, chosen: dict[str, Any], told: str) -> None:
    wrong = options(run, jsonl=True)
    wrong.__dict__.update(chosen)
    with pytest.raises(UserError, match=told):
        samples.run(wrong)


def test_a_folder_that_is_no_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"not a run's folder: config\.yaml is not in it$"):
        samples.run(options(tmp_path, jsonl=True))


@pytest.mark.parametrize("jsonl", [True, False])
def test_that_nothing_was_selected_is_said(run: Path, capsys: pytest.CaptureFixture[str], jsonl: bool) -> None:
    nobody = options(run, jsonl=jsonl)
    nobody.group = 999
    samples.run(nobody)
    out, err = capsys.readouterr()
    assert (out, err) == ("", "no samples here, or none that the options select; steps are counted from 0\n")
