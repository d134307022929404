"""What is shipped beside Python: the scripts and the Dockerfile, by the linters of their languages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = Path(sys.executable).parent
SCRIPTS = ("launcher/node.sh", ".ci/run")


def lint(*command: str) -> tuple[int, str]:
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_pass_shellcheck(script: str) -> None:
    assert lint(str(TOOLS / "shellcheck"), script) == (0, "")


def test_the_dockerfile_passes_hadolint() -> None:
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
def test_images_run_as_an_ordinary_user_and_are_asked_by_grpc(stage: str) -> None:
    instructions = stages()[stage]
    users = [line for line in instructions if line.startswith("USER ")]
    assert users[-1] == "USER 1000:1000"
    (check,) = [line for line in instructions if line.startswith("HEALTHCHECK ")]
    assert "services.health_check" in check


@pytest.mark.parametrize("stage", ["cpu", "cuda", "ascend"])
def test_images_have_what_the_package_links_to_before_it_is_installed(stage: str) -> None:
    """runtime/presets and others are links to configs: without it, pip leaves them out without a word."""
    instructions = stages()[stage]
    installs = next(index for index, line in enumerate(instructions) if line.startswith("RUN") and "constraints.txt ." in line)
    assert "COPY configs configs" in instructions[:installs]
