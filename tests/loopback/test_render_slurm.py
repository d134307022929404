"""The batch script: by bash and shellcheck, and carried out with stand-ins for Slurm's commands and torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher.render.files import slurm
from launcher.render.plan import Plan
from runtime.errors import ConfigError
from tests.unit.render_cases import auto, listed, made, reloaded

PATIENCE = 60.0  # seconds
SHELLCHECK = Path(sys.executable).parent / "shellcheck"
PLANS = {
    "one": made(),
    "cuda": made("cuda", 8, **auto(3), services={"coordinator": {"port": 7000}}),
    "named": made("npu", **listed(n1=8, n2=8)),
}
STAND_INS = {
    "scontrol": '[ "$1 $2" = "show hostnames" ] && tr , "\\n" <<< "$3"',
    # A task on each of the other nodes, to which it passes signals on.
    "srun": """
        echo "$@" >> srun.called
        while [[ $1 == -* ]]; do shift; done
        trap 'kill -TERM $(jobs -p)' TERM
        for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST" | tail -n +2); do SLURMD_NODENAME=$node "$@" & done
        wait
    """,
    # The first agent ends the run when it is asked to; the others end with it.
    "torchrun": """
        trap 'touch "$SLURMD_NODENAME.asked" ended; exit 7' TERM
        printf '%s\\n' "$@" > "$SLURMD_NODENAME.tmp" && mv "$SLURMD_NODENAME.tmp" "$SLURMD_NODENAME.started"
        while [[ ! -e ended ]]; do sleep 0.02; done
        touch "$SLURMD_NODENAME.ended"
    """,
}


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def submit(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, body in STAND_INS.items():
        (tools / name).write_text(f"#!/usr/bin/env bash\n{body}")
        (tools / name).chmod(0o755)
    started: list[subprocess.Popen[str]] = []

    def run(plan: Plan, *nodes: str) -> subprocess.Popen[str]:
        for name, text in slurm(plan).items():
            (tmp_path / name).write_text(text)
        environment = {
            "PATH": f"{tools}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "123456",
            "SLURM_JOB_NODELIST": ",".join(nodes),
            "SLURM_SUBMIT_DIR": str(tmp_path),
            "SLURMD_NODENAME": nodes[0],
        }
        command = ["bash", "sluice.sbatch"]
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        started.append(process)
        return process

    yield run
    (tmp_path / "ended").touch()
    for process in started:
        process.communicate(timeout=PATIENCE)


def test_the_scripts_are_well_formed(tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.sbatch" for name in PLANS]
    for path, plan in zip(paths, PLANS.values(), strict=True):
        path.write_text(slurm(plan)["sluice.sbatch"])
    for command in (*(["bash", "-n", path] for path in paths), [SHELLCHECK, *paths]):
        found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (found.returncode, found.stdout + found.stderr) == (0, "")


def test_a_signal_drains_by_the_first_agent_alone(submit: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    process = submit(PLANS["cuda"], "n1", "n2", "n3")
    until(lambda: all((tmp_path / f"n{node}.started").exists() for node in (1, 2, 3)))
    process.terminate()
    said, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 7  # the first agent's
    assert said == "coordinator: n1:7000\n"
    assert sorted(path.name for path in tmp_path.glob("*.asked")) == ["n1.asked"]
    assert sorted(path.name for path in tmp_path.glob("*.ended")) == ["n2.ended", "n3.ended"]


def test_every_agent_is_told_its_name_and_the_same_run(submit: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    process = submit(PLANS["named"], "n1", "n2")
    until(lambda: all((tmp_path / f"n{node}.started").exists() for node in (1, 2)))
    (tmp_path / "ended").touch()
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    for node in ("n1", "n2"):
        assert (tmp_path / f"{node}.started").read_text().splitlines() == [
            *("--rdzv-backend", "sluice", "--nproc-per-node", "1", "--max-restarts", "0", "-m", "sluice.node"),
            *("--name", node, "--devices", "8", str(tmp_path / "config.yaml")),
            *("services.coordinator.host=n1", f"services.coordinator.port={29400 + 123456 % 1000}"),
        ]


def test_one_node_needs_no_step(submit: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    process = submit(PLANS["one"], "n1")
    until(lambda: (tmp_path / "n1.started").exists())
    (tmp_path / "ended").touch()
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert not (tmp_path / "srun.called").exists()
    assert "--devices" not in (tmp_path / "n1.started").read_text()


def test_slurm_is_asked_for_the_nodes_and_their_devices(tmp_path: Path) -> None:
    """tests/unit/render has the whole of one script."""
    script = slurm(PLANS["cuda"])
    assert {"#SBATCH --nodes=3", "#SBATCH --gres=gpu:8"} <= set(script["sluice.sbatch"].splitlines())
    assert "--gres" not in slurm(PLANS["one"])["sluice.sbatch"]
    assert reloaded(script["config.yaml"], tmp_path).cluster.min_nodes == 3


def test_nodes_that_one_script_cannot_ask_for_are_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        slurm(made("cuda", **listed(**{"a b": 8, "c": 4})))
    assert [fault.partition(":")[0] for fault in refused.value.faults] == ["cluster.nodes", "cluster.nodes.0.name"]
