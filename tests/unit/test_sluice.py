"""The package that users import: its names, what loading it costs, and that a project may have packages of any name."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import sluice
from sluice import start
from tests.unit.source_tree import ROOT

OURS = re.compile(r"^\s*(?:from|import) (?:runtime|services|launcher)\b.*", re.MULTILINE)


def test_every_name_is_there() -> None:
    assert {*sluice.__all__, "__version__"} == set(dir(sluice))
    for name in dir(sluice):
        assert getattr(sluice, name) is not None
    with pytest.raises(AttributeError, match="'sluice' has no attribute 'rules'"):
        _ = sluice.rules


def test_what_a_type_checker_sees_is_what_is_imported() -> None:
    tree = ast.parse(Path(sluice.__file__).read_text())
    (typed,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {(node.module, one.name) for node in typed.body if isinstance(node, ast.ImportFrom) for one in node.names}
    found = {(module, name) for module, names in sluice._MODULES.items() for name in names}
    assert seen - {("pathlib", "Path")} == found
    declared = (ROOT / "pyproject.toml").read_text()
    for package in {"sluice", *(module.partition(".")[0] for module, _ in found)}:  # or it takes every name for Any
        assert (ROOT / package / "py.typed").is_file(), package
        assert re.search(rf'^{package} = \[[^\]]*"py\.typed"', declared, re.MULTILINE), package


def test_the_pages_import_sluice_alone() -> None:
    pages = [ROOT / "README.md", ROOT / "README.zh.md", *(ROOT / "docs").rglob("*.md")]
    found = {
        f"{page.relative_to(ROOT)}: {line}"
        for page in pages
        if "adr" not in page.parts
        for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
        for line in OURS.findall(block)
    }
    found |= {str(path) for path in (ROOT / "configs").glob("*.py") if OURS.search(path.read_text())}
    assert found == set()


def interpreters() -> list[Path]:
    """This Python, and those from 3.10 on that are found."""
    named = [shutil.which(f"python3.{minor}") for minor in range(10, 20)]
    pyenv = (Path.home() / ".pyenv" / "versions").glob("3.1[0-9].*/bin/python3")
    return sorted({Path(sys.executable), *pyenv, *(Path(one) for one in named if one and "shims" not in one)})


def ran(command: Sequence[str], folder: Path, *path: Path) -> str:
    """What it prints in that folder, with PYTHONPATH; it ends well and complains of nothing."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path)), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("python", interpreters(), ids=str)
def test_a_process_is_ours_where_the_project_has_packages_of_those_names(python: Path, tmp_path: Path) -> None:
    """They are in the working folder, and on PYTHONPATH."""
    for name in start.PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('the package of the project')\n")
    for name in start.PACKAGES if python == Path(sys.executable) else start.PACKAGES[:1]:
        ran(start.command(f"{name}.__init__", python=str(python)), tmp_path, tmp_path)


SPAWNS = """
import multiprocessing


def work():
    from runtime.errors import UserError


if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=work)
    child.start()
    child.join(50)
    raise SystemExit(child.exitcode)
"""


def test_what_a_process_spawns_is_ours_too_and_what_the_folder_has_besides_is_found_last(tmp_path: Path) -> None:
    """As vLLM starts its engine: anew, and with the path of the process alone. The project is on PYTHONPATH."""
    (tmp_path / "runtime").mkdir()
    (tmp_path / "runtime" / "__init__.py").write_text("raise SystemExit('the package of the project')\n")
    (tmp_path / "spawns.py").write_text(SPAWNS)
    ran(start.command("spawns"), tmp_path, tmp_path, ROOT)
    (tmp_path / "json.py").write_text("raise SystemExit('not the json of Python')\n")
    (tmp_path / "own_module.py").write_text("import json\nprint('own')\n")
    assert ran(start.command("own_module"), tmp_path, tmp_path / "elsewhere") == "own\n"


def test_only_a_project_that_hides_ours_comes_last_on_the_path(tmp_path: Path) -> None:
    """Another environment's libraries stay before the working folder, though an installation of Sluice lies among them."""
    for name in ("project/runtime/__init__.py", "environment/runtime/__init__.py", "environment/sluice/start.py", "plain/a"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    (tmp_path / "working").mkdir()
    (tmp_path / "working" / "shows.py").write_text("import sys\nprint(*sys.path, sep='\\n')\n")
    path = [tmp_path / name for name in ("project", "environment", "plain")]
    lines = ran(start.command("shows"), tmp_path / "working", *path).splitlines()
    shown = [Path(line).name for line in lines if Path(line).parent == tmp_path]
    assert shown == ["environment", "plain", "working", "project"]
