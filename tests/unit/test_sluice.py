"""The package that users import: its names, what loading it costs, and that a project may have packages of any name."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import sluice
from sluice import start

ROOT = Path(__file__).parents[2]
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


def test_no_name_loads_torch() -> None:
    code = "import sys, sluice; [getattr(sluice, name) for name in dir(sluice)]; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False).returncode == 0


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


@pytest.mark.parametrize("python", interpreters(), ids=str)
@pytest.mark.parametrize("name", start.PACKAGES)
def test_a_process_is_ours_where_the_project_has_a_package_of_that_name(name: str, python: Path, tmp_path: Path) -> None:
    """It is in the working folder, and on PYTHONPATH."""
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("raise SystemExit('the package of the project')\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    command = start.command(f"{name}.__init__", python=str(python))
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_the_working_folder_has_besides_is_found_last(tmp_path: Path) -> None:
    (tmp_path / "own_module.py").write_text("print('own')\n")
    (tmp_path / "json.py").write_text("raise SystemExit('not the json of Python')\n")
    done = subprocess.run(start.command("own_module"), cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "own\n")


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


def test_what_a_process_spawns_is_ours_too(tmp_path: Path) -> None:
    """As vLLM starts its engine: anew, and with the path of the process alone. The project is on PYTHONPATH."""
    (tmp_path / "runtime").mkdir()
    (tmp_path / "runtime" / "__init__.py").write_text("raise SystemExit('the package of the project')\n")
    (tmp_path / "spawns.py").write_text(SPAWNS)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT))), "PYTHONDONTWRITEBYTECODE": "1"}
    command = start.command("spawns")
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_only_a_project_that_hides_ours_comes_last_on_the_path(tmp_path: Path) -> None:
    """Another environment's libraries stay before the working folder, though an installation of Sluice lies among them."""
    folders = {name: tmp_path / name for name in ("project", "environment", "plain", "working")}
    for name in ("project/runtime/__init__.py", "environment/runtime/__init__.py", "environment/sluice/start.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    for folder in folders.values():
        folder.mkdir(exist_ok=True)
    (folders["working"] / "shows.py").write_text("import sys\nprint(*sys.path, sep='\\n')\n")
    path = os.pathsep.join(str(folders[name]) for name in ("project", "environment", "plain"))
    environment = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    command = start.command("shows")
    done = subprocess.run(
        command, cwd=folders["working"], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    shown = [Path(line).name for line in done.stdout.splitlines() if Path(line).parent == tmp_path]
    assert shown == ["environment", "plain", "working", "project"]


def test_processes_of_ours_are_started_by_start() -> None:
    """`-m MODULE` would look into the working folder first; what is named sluice there users have to import as ours anyway."""
    by_module = re.compile(r'"-m",(?! "(?:torch\.|sluice\.))')
    sources = [path for folder in ("runtime", "services", "launcher", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    found = {str(path.relative_to(ROOT)) for path in sources if by_module.search(path.read_text())}
    assert found == set()
