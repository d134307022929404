"""How a role is added: to a copy of the tree, in these files and no others, and a run that trains with it.

The role is a judge, whose replicas give each reply a score; CONTRIBUTING.md, "Add a role", tells the same. Of one that is asked
something of its own the command is compiled, and read as it was written; no run asks it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.runs import ROOT, check_gone, points, write_config

pytestmark = pytest.mark.timeout(240)

SCORE = 7.0
JUDGE = f"""
from runtime.rewards.scorer import column
from runtime.rewards.rules import RuleOutcome
from services import process


class JudgeService(process.Service):
    role = "judge"

    def load(self):
        pass

    async def score(self, request):
        return column(request.group_id, self.role, 1.0, [RuleOutcome({SCORE})] * self.config.sampling.group_size)


if __name__ == "__main__":
    process.main(JudgeService)
"""
SECTION = ("    critic: Trainer = Trainer()\n", "    critic: Trainer = Trainer()\n    judge: Scorer | None = None\n")
SCORERS = ('SCORERS = {"reward": "rule_reward", ', 'SCORERS = {"reward": "rule_reward", "judge": "judge", ')

PROTO = """
syntax = "proto3";
package sluice.v1;

import "services/rpc/generated/common.proto";

message VerdictRequest {
  string question = 1;
}

message VerdictReply {
  bytes verdicts = 1;  // msgpack list of numbers
}

service Judge {
  rpc Session(stream CallFrame) returns (stream ReplyFrame);
  rpc Verdict(VerdictRequest) returns (VerdictReply);
}
"""
COMMAND = """

class Verdict(Command[list[float]], frozen=True):
    question: str
"""
ROW = (
    "\n_ROWS = (\n",
    '\n_ROWS = (\n    _command("Judge", commands.Verdict, _SCORE, callers=(keys.COORDINATOR, "gateway")),\n',
)
ASKED = """
from runtime.commands import Verdict
from runtime.config import Config, Run
from services.rpc import contract, security

method = contract.method_of(contract.service_of("judge", Config(run=Run(name="a"))), Verdict("why"))
assert method.request.parse(method.request.serialize(Verdict("why"))) == Verdict("why")
assert method.reply.parse(method.reply.serialize([0.5])) == [0.5]
assert {"coordinator", "gateway"} == set(security.callers_of("/sluice.v1.Judge/Session"))
"""


def copied(tree: Path) -> Path:
    """What a run needs of the tree."""
    for folder in ("proto", "sluice", "services", "runtime", "launcher", "configs"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return tree


def edited(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, (path, old)
    path.write_text(text.replace(old, new))


def run_in(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(tree), "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=tree, env=environment, capture_output=True, text=True, timeout=180, check=False
    )


def test_a_role_that_scores_is_three_files_and_trains(tiny: Path, tmp_path: Path) -> None:
    tree, folder = copied(tmp_path / "tree"), tmp_path / "run"
    (tree / "services" / "judge.py").write_text(JUDGE)
    edited(tree / "runtime" / "config" / "__init__.py", *SECTION)
    edited(tree / "runtime" / "types.py", *SCORERS)
    config = write_config(tmp_path / "config.yaml", tiny, services={"judge": {"replicas": 2}})
    run = run_in(tree, "-m", "launcher.cli", "train", str(config), f"run.dir={folder}")
    assert run.returncode == 0, run.stdout + run.stderr
    check_gone(folder)
    assert {path.name for path in (folder / "logs").glob("judge-*")} >= {"judge-0.log", "judge-1.log"}
    trained = [point for point in points(folder) if "judge_rewards/mean" in point]
    assert trained and all(point["judge_rewards/mean"] == SCORE for point in trained)
    assert any("timing/judge" in point and "timing/non_overlap_judge" in point for point in trained)
    assert all(point["score/mean"] >= SCORE for point in trained)
    without = run_in(tree, "-m", "launcher.cli", "validate", str(write_config(tmp_path / "without.yaml", tiny)))
    assert without.returncode == 0 and "judge" not in without.stdout


def test_a_command_of_its_own_is_its_message_its_struct_and_a_row(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="needs grpcio-tools, to compile the role's messages: make install-dev")
    tree = copied(tmp_path / "tree")
    (tree / "proto" / "judge.proto").write_text(PROTO)
    with (tree / "runtime" / "commands.py").open("a") as file:
        file.write(COMMAND)
    edited(tree / "services" / "rpc" / "contract.py", *ROW)
    protoc = ("-m", "grpc_tools.protoc", "-I", "services/rpc/generated=proto", "--python_out=.", "proto/judge.proto")
    for arguments in (protoc, ("-c", ASKED)):
        done = run_in(tree, *arguments)
        assert done.returncode == 0, done.stderr
