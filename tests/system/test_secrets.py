"""A whole run that is given a secret by name: the process has it, and nothing that the run leaves has."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from runtime import run_files
from tests.system.runs import one_line, sluice, trained, write_config

pytestmark = pytest.mark.timeout(240)

VALUE = "s3cr3t-value"
RULE = """
import json, os

from runtime.rewards.rules import rule


@rule("tells")
def tells(text, label, context):
    with open({seen!r}, "w") as file:
        json.dump(dict(os.environ), file)
    return float(sum(map(ord, text)) % 7)
"""


def test_a_secret_reaches_the_process_that_names_it_and_no_file(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MINE", "WANDB_API_KEY"):
        monkeypatch.setenv(name, VALUE)
    seen, rule = tmp_path / "seen.json", tmp_path / "rules.py"
    rule.write_text(RULE.format(seen=str(seen)))
    rewards = {"rules": [{"name": f"{rule}:tells"}], "workers": 1}
    services = {"reward": {"env": {"JUDGE_KEY": {"from": "MINE"}}}}
    config = write_config(tmp_path / "config.yaml", tiny, rewards=rewards, services=services)
    run = trained(config, "training.steps=1", folder=tmp_path / "run", timeout=120)
    environment = json.loads(seen.read_text())
    assert environment["JUDGE_KEY"] == VALUE
    assert not environment.keys() & {"MINE", "WANDB_API_KEY"}
    written = [path for path in run.folder.rglob("*") if path.is_file()]
    assert [path for path in written if VALUE.encode() in path.read_bytes()] == []
    assert VALUE not in run.output + run.errors
    private = [run.folder / run_files.CONFIG, *(run.folder / run_files.NODES).iterdir()]
    assert len(private) == 2
    assert {stat.S_IMODE(path.stat().st_mode) for path in private} == {0o600}


def test_a_variable_that_is_not_there_is_one_line(config: Path, tmp_path: Path) -> None:
    done = sluice("train", str(config), f"run.dir={tmp_path / 'run'}", "services.trainer.env.A={from: NOT_SET_ANYWHERE}")
    assert done.returncode == 2
    said = "services.trainer.env.A: {from: NOT_SET_ANYWHERE}: this machine's environment has no NOT_SET_ANYWHERE"
    assert one_line(done.stderr) == f"error: {said}"
