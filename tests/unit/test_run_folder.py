"""A run's folder: no earlier run is lost unasked; `sluice samples` over a ledger: what is shown, and what became of groups."""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from launcher import run_folder
from launcher.commands import samples
from runtime import config, run_files, timeouts, types
from runtime.config import Run, loading
from runtime.coordinator.buffer import NO_SIGNAL, Buffer
from runtime.coordinator.evaluation import Transcript
from runtime.data.handlers import Problem
from runtime.data.prompts import StreamState
from runtime.errors import UserError
from runtime.evaluation import results as evaluation
from runtime.ledger import checkpoint
from runtime.ledger.checkpoint import Position
from runtime.ledger.journal import LedgerWriter
from runtime.ledger.reader import CheckpointSaved
from runtime.ledger.states import Mark
from runtime.models.tiny_model import write_tokenizer
from runtime.types import GeneratedGroup, GroupPayload, Outcomes, PolicyVersion, Sample, Scores, TurnReward
from tests.unit.test_buffer import ticket

STREAM = StreamState(position=0, ordinal=0, returned=[], seed=0, shuffle=True, problems=1, fingerprint=0)


def chosen(folder: Path, resume: object = "never", overwrite: bool = False, **sections: Any) -> config.Config:
    return config.Config(run=Run(name="a", dir=str(folder), resume=str(resume), overwrite=overwrite), **sections)


def taken(folder: Path, **run: Any) -> None:
    run_folder.prepare(folder, Run(name="a", **run))[1].close()


async def journal(folder: Path, trained: bool = False) -> None:
    ledger = await LedgerWriter.open(folder / run_files.LEDGER, 1 << 20)
    if trained:
        ledger.record(CheckpointSaved(step=40, incarnation=0, path="there", at=0.0))
    await ledger.close()


def save(folder: Path) -> None:
    partial = checkpoint.begin(folder)
    (partial / "trainer.json").write_text("{}")
    checkpoint.complete(partial, folder, Position(version=PolicyVersion(0, 10), stream=STREAM, trained=[]))


@pytest.mark.parametrize("resume", ["never", ""])  # "" is what a run that began anew keeps in its own config.yaml
def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path, resume: str) -> None:
    (tmp_path / run_files.LEDGER).mkdir()
    with pytest.raises(UserError, match="holds a run already"):
        taken(tmp_path, resume=resume)
    taken(tmp_path, resume=resume, overwrite=True)
    taken(tmp_path, resume="auto")


def test_a_run_that_ended_before_its_first_sample_is_replaced(tmp_path: Path) -> None:
    asyncio.run(journal(tmp_path))
    taken(tmp_path)
    (tmp_path / run_files.EVALUATIONS).mkdir()
    with pytest.raises(UserError, match="holds a run already"):
        taken(tmp_path)


def test_whoever_only_looks_whether_a_run_is_under_way_keeps_none_from_starting(tmp_path: Path) -> None:
    (tmp_path / run_files.LOCK).touch()
    looking = (tmp_path / run_files.LOCK).open("rb")
    fcntl.flock(looking, fcntl.LOCK_SH)
    threading.Timer(2 * timeouts.RUN_LOCK_POLL, looking.close).start()
    taken(tmp_path)


def test_a_folder_under_way_is_refused_and_is_its_users_alone(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a"
    _, lock = run_folder.prepare(folder, Run(name="a"))
    with (
        lock,
        pytest.raises(UserError, match=rf"a run is under way in {folder}: process {os.getpid()}, .* of user {os.getuid()}$"),
    ):
        run_folder.prepare(folder, Run(name="a"))
    (folder / run_files.LOCK).chmod(0o644)  # as an earlier version made it
    taken(folder)
    modes = [path.stat().st_mode & 0o777 for path in (folder, folder / run_files.LOCK)]
    assert modes == [0o700, 0o600]
    folder.chmod(0o750)
    taken(folder)
    assert folder.stat().st_mode & 0o777 == 0o750, "its user shares it"


@pytest.mark.parametrize("name", [run_files.MODEL, run_files.CHECKPOINTS, run_files.CONFIG])
def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "mine").touch()
    for overwrite in (False, True):
        with pytest.raises(UserError, match=f"is not the folder of a run, and a run would replace '{name}' in it"):
            taken(tmp_path, resume="auto", overwrite=overwrite)
    assert sorted(path.name for path in tmp_path.rglob("*")) == sorted([name, "mine"])


@pytest.mark.parametrize("section", ["model", "data", "critic"])
def test_a_new_run_does_not_remove_what_it_is_to_read(tmp_path: Path, section: str) -> None:
    (tmp_path / run_files.MODEL).mkdir()
    reads = {
        "model": config.Model(path=f"{tmp_path}/model"),
        "data": config.Data(train=f"{tmp_path}/evaluations/a.jsonl"),
        "critic": config.Critic(path=f"{tmp_path}/checkpoints/step-00000001"),
    }
    with pytest.raises(UserError, match="would be removed by a new run in"):
        run_folder.begin(tmp_path, chosen(tmp_path, overwrite=True, **{section: reads[section]}))
    assert (tmp_path / run_files.MODEL).is_dir()


def test_a_trained_model_without_its_checkpoints_is_not_trained_over(tmp_path: Path) -> None:
    (tmp_path / run_files.MODEL).mkdir()
    with pytest.raises(UserError, match=r"finds no checkpoint in .*, which holds a trained model"):
        run_folder.begin(tmp_path, chosen(tmp_path, "auto"))
    assert run_folder.begin(tmp_path, chosen(tmp_path, "auto", overwrite=True)) == ""
    assert not (tmp_path / run_files.MODEL).exists()


def test_a_ledger_whose_checkpoints_are_gone_is_not_begun_over(tmp_path: Path) -> None:
    asyncio.run(journal(tmp_path, trained=True))
    finds = r"^run.resume: auto finds no checkpoint in .*, which holds a ledger of steps that were"
    with pytest.raises(UserError, match=finds):
        run_folder.begin(tmp_path, chosen(tmp_path, "auto"))
    assert (tmp_path / run_files.LEDGER).is_dir()
    assert run_folder.begin(tmp_path, chosen(tmp_path, "auto", overwrite=True)) == ""
    assert not (tmp_path / run_files.LEDGER).exists()
    asyncio.run(journal(tmp_path))  # which was killed before its first step
    assert run_folder.begin(tmp_path, chosen(tmp_path, "auto")) == ""
    (tmp_path / run_files.LEDGER).mkdir()
    (tmp_path / run_files.LEDGER / "ledger.sqlite").write_text("not a database")
    with pytest.raises(UserError, match=r"which holds a ledger that cannot be read \("):
        run_folder.begin(tmp_path, chosen(tmp_path, "auto"))


def test_a_run_with_checkpoints_is_not_replaced_without_a_word(tmp_path: Path) -> None:
    for step in (40, 50):
        save(checkpoint.folder_for(tmp_path, step))
    said: list[str] = []
    assert run_folder.begin(tmp_path, chosen(tmp_path, overwrite=True), said.append) == ""
    assert said == [f"run.overwrite: replaces the run in {tmp_path}, whose newest checkpoint was step-00000050"]


def test_a_checkpoint_of_a_branch_that_the_run_has_left_is_moved_back_first(tmp_path: Path) -> None:
    for step in (40, 50):
        save(checkpoint.folder_for(tmp_path, step))
    assert checkpoint.set_aside(tmp_path, 40, 1) == [50]
    dead = tmp_path / run_files.CHECKPOINTS / "dead-1" / "step-00000050"
    of_a_branch = r"^run.resume: .*dead-1/step-00000050 is of a branch that the run has left; move it to"
    with pytest.raises(UserError, match=of_a_branch):
        run_folder.begin(tmp_path, chosen(tmp_path, dead))
    dead.rename(checkpoint.folder_for(tmp_path, 50))
    said: list[str] = []
    found = run_folder.begin(tmp_path, chosen(tmp_path, "auto", overwrite=True), said.append)
    assert Path(found).name == "step-00000050"
    assert said == [f"run.resume: going on from {found}; run.overwrite replaces nothing"]


def test_a_checkpoint_of_another_run_begins_a_folder_of_its_own(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs" / run_files.CHECKPOINTS / "step-00000010"
    own = tmp_path / "own" / run_files.CHECKPOINTS / "step-00000020"
    for folder in (theirs, own):
        save(folder)
    ours = tmp_path / "own"
    (ours / run_files.LEDGER).mkdir()

    def begin(resume: Path, folder: Path, overwrite: bool = False) -> str:
        return run_folder.begin(folder, chosen(folder, resume, overwrite))

    assert begin(own, ours) == str(own)
    with pytest.raises(UserError, match=rf"^run.resume: {theirs} does not belong to the run in {ours}; .*run.resume=auto"):
        begin(theirs, ours)
    assert own.is_dir() and (ours / run_files.LEDGER).is_dir()
    assert begin(theirs, tmp_path / "new") == str(theirs)
    assert begin(theirs, ours, overwrite=True) == str(theirs)  # in the place of the run
    assert not own.exists() and not (ours / run_files.LEDGER).exists() and theirs.is_dir()


def test_a_checkpoint_is_not_removed_by_the_run_that_begins_with_it(tmp_path: Path) -> None:
    kept = tmp_path / run_files.CHECKPOINTS / "kept" / "step-00000010"
    save(kept)
    with pytest.raises(UserError, match=r"^run.resume: .* would be removed by a new run in"):
        run_folder.begin(tmp_path, chosen(tmp_path, kept, overwrite=True))
    assert kept.is_dir()


def letters(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def sample(text: str, mask: np.ndarray) -> Sample:
    logprobs, versions = np.float32(-0.5) * mask.astype(np.float32), np.zeros(len(mask), np.int64)
    return Sample(tokens=letters(text), loss_mask=mask, logprobs=logprobs, versions=versions, finish_reason="stop")


def group(payload: GroupPayload, lengths: list[int]) -> GeneratedGroup:
    counts: dict[str, Any] = {"prompt_tokens": 4, "response_tokens": lengths, "truncated": 0}
    versions = {"oldest": PolicyVersion(), "newest": PolicyVersion()}
    return GeneratedGroup(group_id=payload.group_id, payload=types.encode(payload), **counts, **versions)


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
            payload = types.decode(GroupPayload, generated(-1, "5", "6").payload)
            rewards = np.array([problem, 0.5], np.float32)
            scores = Scores(group_id=-1, rewards=rewards, valid=np.array([1, problem], np.uint8), rules={"gsm8k": rewards})
            asked = Problem(f"e:{problem}", [], "5", "e")
            transcript.add(
                problem, evaluation.replies_to("held_out", asked, [(payload, scores)], config.Rule(name="gsm8k"), Text())
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
    for reward, problem in (("0.75:0.75", "e:1"), (":0", "e:0")):  # the mean of 1 and 0.5; 0 alone, the other has none
        assert {row["group"] for row in rows_of(capsys, evaluated, eval=True, reward=reward)} == {problem}
    assert len(rows_of(capsys, evaluated, eval=True, limit=3)) == 6
    with pytest.raises(UserError, match="no evaluation"):
        rows_of(capsys, evaluated / "none", eval=True)


def test_what_can_choose_nothing_is_refused_and_nothing_chosen_is_said(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for chosen, told in (({"limit": -1}, "--limit: -1 is negative"), ({"step": "5:2"}, "--step: '5:2' ends before it begins")):
        with pytest.raises(UserError, match=told):
            samples.run(options(run, jsonl=True, **chosen))
    with pytest.raises(UserError, match=r"not a run's folder: config\.yaml is not in it$"):
        samples.run(options(tmp_path / "none", jsonl=True))
    for jsonl in (True, False):
        samples.run(options(run, jsonl=jsonl, group=999))
        told = "no samples here, or none that the options select; steps are counted from 0\n"
        assert capsys.readouterr() == ("", told)
