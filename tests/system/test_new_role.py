"""How a role is added: to a copy of the tree, in these files and no others, and a run that trains with it.

The role is a judge, whose replicas give each reply a score; CONTRIBUTING.md, "Add a role", tells the same. (One that is asked
something of its own has a command in runtime/commands.py as well.)
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
MOST = 6  # files that a role may touch, a command of its own included
NEW = {
    "proto/judge.proto": """
syntax = "proto3";
package sluice.v1;

import "services/rpc/generated/common.proto";
import "services/rpc/generated/reward.proto";

service Judge {
  rpc Session(stream CallFrame) returns (stream ReplyFrame);
  rpc Score(ScoreRequest) returns (ScoreReply);
}
""",
    "services/judge.py": f"""
import asyncio

from runtime.rewards.combination import column
from runtime.rewards.rules import RuleOutcome
from services import process


class JudgeService(process.Service):
    role, service = "judge", "Judge"

    def load(self):
        pass

    def score(self, request):
        answer = asyncio.get_running_loop().create_future()
        answer.set_result(column(request.group_id, self.role, 1.0, [RuleOutcome({SCORE})] * self.config.sampling.group_size))
        return answer


if __name__ == "__main__":
    process.main(JudgeService)
""",
}
CHANGED = {
    "runtime/config/services.py": [
        ("    critic: Trainer = Trainer()\n", "    critic: Trainer = Trainer()\n    judge: Scorer = Scorer()\n")
    ],
    "services/rpc/contract.py": [
        ("    coordinator_pb2,\n", "    coordinator_pb2,\n    judge_pb2,\n"),
        ("*(common_pb2, ", "*(judge_pb2, common_pb2, "),
        (
            "\n_ROWS = (\n",
            '\n_ROWS = (\n    _command("Judge", ScoreRequest, _SCORE, name="Score", key=("group_id", "attempt")),\n',
        ),
    ],
    "runtime/coordinator/roles.py": [
        (
            "        self.rewards: ",
            '        self.judges: Replicas = Replicas(register, "judge", patience)\n        self.rewards: ',
        ),
        ('by_phase = {"rule_reward"', 'by_phase = {"judge": roles.judges, "rule_reward"'),
    ],
}


def with_the_role(tree: Path) -> Path:
    """A copy of what a run needs, with the role."""
    for folder in ("proto", "sluice", "services", "runtime", "launcher", "configs"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in NEW.items():
        (tree / name).write_text(text)
    for name, edits in CHANGED.items():
        text = (tree / name).read_text()
        for old, new in edits:
            assert text.count(old) == 1, (name, old)
            text = text.replace(old, new)
        (tree / name).write_text(text)
    protoc = [sys.executable, "-m", "grpc_tools.protoc", "-I", "services/rpc/generated=proto", "--python_out=."]
    subprocess.run([*protoc, "proto/judge.proto"], cwd=tree, check=True, timeout=60)
    return tree


def test_a_new_role_touches_few_files_and_trains(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="needs grpcio-tools, to compile the role's messages: make install-dev")
    assert len(NEW) + len(CHANGED) < MOST
    tree, folder = with_the_role(tmp_path / "tree"), tmp_path / "run"
    config = write_config(tmp_path / "config.yaml", tiny, services={"judge": {"replicas": 2}})
    run = subprocess.run(
        [sys.executable, "-m", "launcher.cli", "train", str(config), f"run.dir={folder}"],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    check_gone(folder)
    assert {path.name for path in (folder / "logs").glob("judge-*")} >= {"judge-0.log", "judge-1.log"}
    trained = [point for point in points(folder) if "judge_rewards/mean" in point]
    assert trained and all(point["judge_rewards/mean"] == SCORE for point in trained)
    assert any("timing/judge" in point for point in trained)
    assert all(point["score/mean"] >= SCORE for point in trained)
