"""`sluice report` over folders as runs leave them: what is in the file, which points are drawn and as what, and its tables."""

from __future__ import annotations

import asyncio
import base64
import fcntl
import hashlib
import json
import math
import os
import shutil
import tarfile
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.recorded_run import record, reply_of
from launcher import cli
from launcher.page import panels
from launcher.page.report import BYTES, report
from runtime import config, run_files
from runtime.config import loading
from runtime.coordinator.buffer import Buffer
from runtime.errors import UserError
from runtime.ledger.journal import LedgerWriter
from runtime.ledger.states import Mark
from runtime.run_files import LOCK
from runtime.telemetry.record import history
from tests.unit.test_buffer import ticket

HOSTILE = "</script><script>alert(1)</script><b>&amp;"


class Elements(HTMLParser):
    """Scripts, visible text, what the script finds in place of a server, and every address that is named."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts: list[tuple[str, str]] = []
        self.addresses: list[str] = []
        self.policy = ""
        self.words: list[str] = []
        self.feed(text)
        self.held = {
            path.removeprefix("/api/run/_/"): found for path, found in json.loads(self.of_type("application/json")[0]).items()
        }
        self.facts = {name: " ".join(rest).strip() for name, *rest in self.held["summary"]["facts"]}
        self.notes = self.held["summary"]["notes"]
        self.panels = {each["title"]: each for section in self.held["curves"]["sections"] for each in section["panels"]}

    def of_type(self, wanted: str) -> list[str]:
        return [text for kind, text in self.scripts if kind == wanted]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.addresses += [str(named[key]) for key in ("src", "href", "action", "data") if key in named]
        if named.get("http-equiv") == "Content-Security-Policy":
            self.policy = str(named["content"])
        if tag == "script":
            self.scripts.append((named.get("type") or "text/javascript", ""))

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
        else:
            self.words.append(data)


def step(number: int, **metrics: Any) -> dict[str, Any]:
    return {"step": number, "time": 1000.0 + number, "timing/all": 0.5, **metrics}


def told(number: int, **metrics: Any) -> dict[str, Any]:
    """A step with what every page has."""
    scores = {"score/mean": number / 10, "staleness/histogram": {"0": 3, "1": 1}, "staleness/max": 1.0}
    return step(number, **{"timing/update": 0.25, "samples": 8.0, **scores, **metrics})


def made(folder: Path, points: list[dict[str, Any]], tail: str = "", **sections: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {"run": config.Run(name="arithmetic"), "data": config.Data(train="train.jsonl")}
    settings["training"] = config.Training(steps=200)
    (folder / run_files.CONFIG).write_text(loading.to_yaml(config.Config(**(settings | sections))))
    (folder / run_files.METRICS).write_text("".join(json.dumps(point) + "\n" for point in points) + tail)
    return folder


def read(folder: Path, output: Path | None = None) -> Elements:
    return Elements(report(folder, output).read_text(encoding="utf-8"))


def ends(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str]]:
    """Exit code, and what is said on standard error."""
    with pytest.raises(SystemExit) as end:
        cli.main(["report", *arguments])
    return int(end.value.code or 0), capsys.readouterr().err.splitlines()


def test_a_file_with_everything_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made(tmp_path / "run", [{"step": 0, "eval/accuracy": 0.5}, *map(told, range(1, 40))])
    assert ends(capsys, str(folder)) == (0, [])
    found = Elements((folder / "report.html").read_text(encoding="utf-8"))
    assert found.addresses == []
    assert found.held["summary"]["name"] == "arithmetic" and "train: train.jsonl" in found.held["configuration"]["text"]
    assert found.facts["Steps"] == "39 of 200" and found.facts["Held-out accuracy"].startswith("50.0% after step 0")
    assert found.facts["Samples a second"] == "16 19.5 s in 39 steps"
    (reward,) = found.panels["Reward"]["series"]
    assert reward["name"] == "mean of the batch" and len(reward["y"]) == len(reward["smooth"]) == 39
    assert report(folder, tmp_path / "mine.html") == tmp_path / "mine.html"
    assert not list(folder.glob("*.partial")) and not list(folder.glob(".*.partial"))


def test_only_its_own_scripts_may_run(tmp_path: Path) -> None:
    found = read(made(tmp_path, [told(1)]))
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in found.of_type("text/javascript")]
    rules = dict(rule.strip().split(" ", 1) for rule in found.policy.split(";"))
    assert rules["default-src"] == "'none'" and "connect-src" not in rules
    assert rules["script-src"].split() == [f"'sha256-{each}'" for each in hashes]


def test_nothing_that_a_run_names_acts_as_html(tmp_path: Path) -> None:
    """It stands in data alone, which the page shows as text."""
    scores = {f"{HOSTILE}_rewards/mean": 1.0, "acc_rewards/mean": 0.5, f"score/errors/{HOSTILE}": 1.0}
    folder = made(tmp_path, [told(n, **scores) for n in (1, 2)], run=config.Run(name=HOSTILE))
    (folder / run_files.SUMMARY).write_text(json.dumps({"stop_reason": HOSTILE}))
    (folder / run_files.LOGS).mkdir()
    (folder / run_files.LOGS / f"{HOSTILE.replace('/', '|')}.log").write_text(HOSTILE)
    text = report(folder, None).read_text(encoding="utf-8")
    plain = read(made(tmp_path / "plain", [told(1)]))
    found = Elements(text)
    assert "<script>alert" not in text and "</script><b>" not in text
    assert found.of_type("text/javascript") == plain.of_type("text/javascript") and len(found.scripts) == len(plain.scripts)
    assert found.words == plain.words and found.policy == plain.policy
    assert found.held["summary"]["name"] == HOSTILE and found.held["summary"]["state"] == f"stopped: {HOSTILE}"
    assert HOSTILE in {each["name"] for each in found.panels["Reward by rule, before weights"]["series"]}


def test_a_text_that_is_no_unicode_is_one_line(tmp_path: Path) -> None:
    folder = made(tmp_path, [told(1)])
    (folder / run_files.CONFIG).write_text('run: {name: "\\ud800"}\n')
    with pytest.raises(UserError, match="is not Unicode"):
        report(folder, None)


def test_the_newest_samples_are_in_it_and_not_more_than_it_bears(tmp_path: Path) -> None:
    folder = record(tmp_path / "run", 30, 2, 2)
    found = read(folder)
    groups = {name: each for name, each in found.held.items() if name.startswith("group?")}
    assert found.held["samples"]["ids"] == [*range(10, 60)] and found.held["samples"]["of"] == 60
    assert groups.keys() == {f"group?id={each}" for each in range(10, 60)}
    assert groups["group?id=10"]["samples"][1]["reply"] == reply_of(10, 1)
    large = read(record(tmp_path / "large", 1, 3, 1, ["y" * BYTES])).held["samples"]
    assert (large["ids"], large["rows"], large["of"]) == ([1, 2], [1, 1], 3)
    (folder / "tokenizer.json").unlink()
    assert read(folder).held["samples"].keys() == {"error"}


def test_a_run_that_was_resumed(tmp_path: Path) -> None:
    points = [*(told(n, incarnation=0.0) for n in range(1, 7)), *(told(n, incarnation=1.0) for n in range(5, 9))]
    found = read(made(tmp_path, points))
    assert found.notes[0] == "2 steps were done again from a checkpoint, and are left out."
    assert found.held["curves"]["returns"] == [4]
    assert found.held["curves"]["lineages"]["rows"][0][:4] == ["0", "1 to 6", "1 to 4", "5 to 6"]


def test_how_a_run_ended_is_said(tmp_path: Path) -> None:
    """Killed, with a torn last line and an address that none serves; ended, and killed after that; under way."""
    folder = made(tmp_path, [told(1, time=1e9), told(2, time=1e9 + 99)], tail='{"step":3,"timing/a')
    (folder / run_files.ADDRESS).write_text("127.0.0.1:1")
    (folder / LOCK).touch()
    found = read(folder)
    assert found.held["summary"]["state"].startswith("ended without a summary") and found.facts["Steps"] == "2 of 200"
    assert found.notes[0] == "The last line of metrics.jsonl is not whole, and left out."
    (folder / run_files.SUMMARY).write_text('{"stop_reason": "2 hours are over", "of another": "version"}')
    assert read(folder).held["summary"]["state"] == "stopped: 2 hours are over"
    os.utime(folder / run_files.SUMMARY, (1e9, 1e9))
    assert read(folder).held["summary"]["state"].startswith("ended without a summary")
    with (folder / LOCK).open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert read(folder).held["summary"]["state"] == "under way"


def test_a_run_that_has_not_begun(tmp_path: Path) -> None:
    folder = made(tmp_path, [])
    found = read(folder)
    assert found.notes[0] == "No training step has been logged."
    assert not any(panel["series"] for panel in found.panels.values())
    (folder / run_files.METRICS).unlink()
    found = read(folder)
    assert found.notes[0].startswith("There is no metrics.jsonl") and found.facts["Steps"] == "0 of 200"
    assert [*found.facts.values()].count("not measured") >= 4
    assert found.held["occupancy"].keys() == {"error"}


def test_the_configuration_of_another_version_is_shown_as_it_is(tmp_path: Path) -> None:
    folder = made(tmp_path, [told(1)])
    (folder / run_files.CONFIG).write_text("run: {name: on, color: red}\ntraining: {steps: 7}\nnew: [1]\n")
    found = read(folder)
    assert found.held["summary"]["name"] == "on" and found.facts["Steps"] == "1 of 7"
    assert "color: red" in found.held["configuration"]["text"]
    (folder / run_files.CONFIG).unlink()
    assert read(folder).held["configuration"]["text"] == ""


def test_values_of_environment_variables_stay_where_they_are(tmp_path: Path) -> None:
    env = {"WANDB_API_KEY": "secret-1"}
    reference = config.FromEnvironment(variable="HF_TOKEN")
    fleet = config.Rollout(env={**env, "TOKEN": reference}, engine_args={"hf_token": "secret-2", "block_size": 16})
    roles = config.Services(rollout=[fleet, config.Rollout()], trainer=config.Trainer(env={**env}))
    found = report(made(tmp_path, [told(1)], services=roles), None).read_text(encoding="utf-8")
    assert found.count("WANDB_API_KEY: (not shown)") == 2 and "secret-" not in found
    assert "hf_token: (not shown)" in found and "from: HF_TOKEN" in found and "block_size:" in found


def test_groups_are_those_of_the_ledger(tmp_path: Path) -> None:
    folder = made(tmp_path, [told(1)])

    async def keep() -> None:
        ledger = await LedgerWriter.open(folder / run_files.LEDGER, 1 << 20)
        buffer = Buffer(needs=Mark.SCORED, groups_per_step=1, staleness=1, journal=ledger, clock=time.time)
        for number in range(3):
            buffer.admit(ticket(number))
        buffer.drop(0, "no signal")
        buffer.drop(1, "run ended")
        await ledger.close()

    asyncio.run(keep())
    found = read(folder).held["occupancy"]
    assert found["groups"] == {"admitted": 1, "dropped": 2} and found["dropped"] == {"no signal": 1, "run ended": 1}


POINTS: tuple[str, ...] = ("nonsense", '{"time": 1}', "[1]", '{"step": "x"}', '{"step": 1, "loss": [2]}', '{"step": 1e300}')
POINTS += ('{"step": 1180591620717411303424}', '{"step": 1, "time": 1e30}', '{"step": 1, "time": {"a": 1}}')
POINTS += ('{"step": 1, "staleness/histogram": 2}', '{"step": 1, "incarnation": {"a": 1}}')


def test_what_is_no_runs_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*arguments: str) -> str:
        code, (line,) = ends(capsys, *arguments)
        assert code == 2
        return line.removeprefix("error: ")

    assert refused(str(tmp_path / "no")) == f"{tmp_path / 'no'}: no such folder"
    (tmp_path / "file").touch()
    assert refused(str(tmp_path / "file")) == f"{tmp_path / 'file'}: not a folder"
    assert refused(str(tmp_path)) == f"{tmp_path}: not a run's folder: neither config.yaml nor metrics.jsonl is in it"
    for line in POINTS:
        folder = made(tmp_path / "run", [told(1)], tail=f"{line}\n")
        assert refused(str(folder)).startswith(f"{folder / 'metrics.jsonl'}: line 2 is not a point"), line
    made(folder, [told(1)])
    before = set(tmp_path.rglob("*"))
    missing = tmp_path / "no" / "a.html"
    for output, why in (
        (missing, f"cannot write {missing}: no such file or directory"),
        (folder, f"{folder} is a folder; must be a file"),
    ):
        assert refused(str(folder), "--output", str(output)).startswith(f"--output: {why}")
    assert set(tmp_path.rglob("*")) == before
    for text in ("a: [", "training: 5\n", "- 1\n"):
        (folder / run_files.CONFIG).write_text(text)
        assert refused(str(folder)).startswith(f"{folder / 'config.yaml'}: not ")
    made(folder, [told(1)])
    (folder / run_files.SUMMARY).write_text("{}")
    with pytest.raises(UserError, match="not a summary"):
        report(folder, None)


# ------------------------------------------------------------------------------------------------ arithmetic


def test_rates_are_over_all_steps_together(tmp_path: Path) -> None:
    """96 samples in 4 s are 24 a second, not the mean of 64 and 10.7."""
    first = {"timing/all": 1.0, "samples": 64.0, "e2e_tps": 300.0, "idle/trainer": 0.5}
    second = {"timing/all": 3.0, "samples": 32.0, "e2e_tps": 100.0, "idle/trainer": 0.1}
    points = [step(1, **first, **{"staleness/mean": 0.0, "staleness/max": 0.0})]
    points += [step(2, **second, **{"staleness/mean": 1.5, "staleness/max": 2.0})]
    evaluated = [{"step": at, "time": 1000.0 + at, "eval/accuracy": found} for at, found in ((0, 0.25), (2, 0.5))]
    found = read(made(tmp_path, [evaluated[0], *points, evaluated[1]])).facts
    assert found["Samples a second"] == "24 4.0 s in 2 steps" and found["Tokens/s and accelerator"] == "150 end to end"
    assert found["Trainer idle"] == "20.0%" and found["Staleness, mean"] == "0.5 max 2, bound 2"
    assert found["Held-out accuracy"] == "50.0% after step 2; 25.0% after 0, best 50.0%"


@pytest.mark.parametrize("told", [True, False], ids=["incarnations", "steps-counted-back"])
def test_steps_that_were_done_again_do_not_count(told: bool) -> None:
    """Killed after step 6, resumed after 4, killed after 5, resumed after 2."""
    tries = [range(1, 7), range(5, 6), range(3, 5)]
    points = [
        step(n, mark=10 * which + n, **({"incarnation": float(which)} if told else {}))
        for which, done in enumerate(tries)
        for n in done
    ]
    found = history(points)
    assert [point["mark"] for point in found.steps] == [1, 2, 23, 24]
    lineages = [(each.incarnation, each.first, each.last, each.kept) for each in found.lineages]
    assert lineages == [(0, 1, 6, 2), (1, 5, 5, 2), (2, 3, 4, 4)]
    assert (found.done_again, found.returns) == (5, [4, 2])


@example([0.0] * 7 + [-9.0, 9.0] + [0.0] * 41, 8)
@given(st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), min_size=1, max_size=300), st.integers(4, 40))
def test_a_thinned_curve_keeps_its_extremes_and_ends(values: list[float], most: int) -> None:
    array = np.array(values)
    kept = panels.extremes(array, most)
    assert (np.diff(kept) > 0).all() and len(kept) <= most
    assert (kept[0], kept[-1]) == (0, len(array) - 1)
    if not np.isnan(array).all():
        assert (np.nanmin(array[kept]), np.nanmax(array[kept])) == (np.nanmin(array), np.nanmax(array))


@given(st.lists(st.floats(0, 10), min_size=1, max_size=200), st.integers(1, 30))
def test_means_of_parts_that_are_stacked_add_up(values: list[float], most: int) -> None:
    array = np.array(values)
    parts = panels.means(array, most)
    assert len(parts) == min(most, len(array))
    edges = np.linspace(0, len(array), len(parts) + 1).astype(int)
    np.testing.assert_allclose(parts, [array[a:b].mean() for a, b in zip(edges, edges[1:])], rtol=1e-9)  # noqa: B905, RUF007
    found = panels.smoothed(np.array([math.nan, 2.0, math.nan, 4.0, 9.0]), 3)
    np.testing.assert_allclose(found, [math.nan, 2.0, 2.0, 3.0, 6.5])


def test_a_run_of_0_2_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """4 steps of 2 groups of 4, as 0.2.0 wrote them: with keys, metrics and spans that have other names now, or are gone. Its
    checkpoints and its model's weights were left out."""

    def said(*command: str) -> str:
        with pytest.raises(SystemExit) as ended:
            cli.main(command)
        assert not ended.value.code
        return capsys.readouterr().out

    monkeypatch.chdir(tmp_path)
    with tarfile.open(Path(__file__).with_name("run-0.2.tar.xz")) as packed:
        packed.extractall(tmp_path, filter="data")
    recorded = Path("of-0.2/config.yaml")
    text = recorded.read_text()
    recorded.write_text(text.replace("tensor_parallel: 1", "tensor_parallel: 2"))
    read = loading.load_recorded(Path("of-0.2"))
    assert (read.weight_sync.in_flight, read.training.depth, read.services.rollout.max_num_seqs) == ("recompute", "bound", 8)
    assert read.services.rollout.parallel.tensor == 2
    recorded.write_text(text)
    shutil.copytree("of-0.2/model", read.model.path)
    rows = [json.loads(line) for line in said("samples", "of-0.2", "--jsonl").splitlines()]
    assert [row["step"] for row in rows] == [step for step in range(4) for _ in range(8)]
    assert all(row["prompt"].startswith(f"<|user|>{row['task'] + 10}+") for row in rows)
    said("report", "of-0.2")
    found = Elements(Path("of-0.2/report.html").read_text())
    assert found.facts["Steps"] == "4 of 4"
    assert all(
        point["weight_sync/bytes"] == 4221968 and point["weight_sync/seconds"] > 0 for point in found.held["weights"]["steps"]
    )
    assert sorted(name for name in found.held if name.startswith("group?")) == [f"group?id={id}" for id in range(8)]
    first, *rest = json.loads(said("why", "of-0.2", "--json"))["steps"]
    assert [part[0] for part in first["parts"]] == ["generate", "reference", "train", "publish"] and len(rest) == 3
    assert all(step["inside"][-1]["gather"] > 0 for step in (first, *rest))  # spans of the sync are found by its name of now
