"""A project whose own packages have the names of Sluice's trains as any other: no process takes them for Sluice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sluice.start import PACKAGES
from tests.system.runs import _environment, check_gone, steps, write_config

pytestmark = pytest.mark.timeout(240)

RULE = """
from sluice import rule

from measures import length


@rule("length")
def own(text, label, context):
    return length(text)
"""


def test_a_project_with_packages_of_our_names_trains(tiny: Path, tmp_path: Path) -> None:
    """In the working folder, and on PYTHONPATH; with a group of ranks, and workers that score."""
    project, run = tmp_path / "project", tmp_path / "run"
    for name in set(PACKAGES) - {"sluice"}:
        (project / name).mkdir(parents=True)
        (project / name / "__init__.py").write_text(f"raise SystemExit('the {name} of the project')\n")
    (project / "measures.py").write_text("def length(text):\n    return float(sum(map(ord, text)) % 7)\n")
    (project / "rules.py").write_text(RULE)
    rewards = {"rules": [{"name": "rules.py:length"}]}
    config = write_config(project / "config.yaml", tiny, rewards=rewards, services={"trainer": {"processes": 2}})
    command = [sys.executable, "-c", f"import sluice; sluice.train({str(config)!r}, 'training.steps=2', 'run.dir={run}')"]
    environment = _environment(project)
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [point["step"] for point in steps(run)] == [1, 2]
    check_gone(run)
