"""Whether the tests find bugs: `python -m tests.planted [NAME ...] [--share WORD]`.

Each bug of this folder is planted in a copy of the tree, and the tests that find the bug run there. A bug is a file NAME.patch:
a line `bug:` that says what is wrong, a line `tests:` with the tests, and a diff of one module.
The exit code is 1 if a bug was not found.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from tests import record

FOLDER, ROOT = Path(__file__).parent, Path(__file__).parents[2]
LIMIT = 600.0  # seconds of the tests of one bug: it is not found if they take longer
ENV = {"PYTHONDONTWRITEBYTECODE": "", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1"}
SHARED = {"SLUICE_SHARED": os.environ.get("SLUICE_SHARED", str(ROOT.parent / "shared"))}  # beside the tree, not in the copy
PYTEST = ("-m", "pytest", "-q", "-x", "-rfE", "-p", "no:cacheprovider", "-p", "no:randomly")
WHERE = "import sys; sys.path.remove(''); import runtime; print(runtime.__file__)"


def read(patch: Path) -> tuple[str, list[str]]:
    """Read a patch, which has to say what is wrong. Returns the one module that it changes, and its tests."""
    text = patch.read_text()
    head, modules = re.match(r"bug: \S.*\ntests: (\S.*)\n", text), re.findall(r"^\+\+\+ b/(.+)$", text, re.MULTILINE)
    assert head is not None and len(modules) == 1, f"{patch.name}: needs lines bug: and tests:, and a diff of one module"
    return modules[0], head[1].split()


def copy_tree(tree: Path) -> None:
    """Copy what git tracks, and what it would track."""
    names = subprocess.check_output(("git", "ls-files", "-zco", "--exclude-standard"), cwd=ROOT, text=True).split("\0")
    for name in (name for name in names if name and os.path.lexists(ROOT / name)):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name, follow_symlinks=False)


def run(tree: Path, *command: str | Path) -> tuple[int | None, str]:
    """Run a command in the copy, whose modules come first. Returns its exit code, None at the limit, and what it printed."""
    own = {name: value for name, value in os.environ.items() if name not in (record.FILE, record.ONLY)}
    env = {**own, **ENV, **SHARED, "PYTHONPATH": str(tree), "GIT_CEILING_DIRECTORIES": str(tree.parent)}
    with tempfile.TemporaryFile("w+") as output:
        process = psutil.Popen(command, cwd=tree, env=env, stdout=output, stderr=output, start_new_session=True)
        try:
            code = process.wait(LIMIT)
        except psutil.TimeoutExpired:
            code = None
        finally:
            if process.is_running():
                for group in {os.getpgid(each.pid) for each in [*process.children(recursive=True), process]}:
                    os.killpg(group, signal.SIGKILL)
        output.seek(0)
        return code, output.read()


def hunt(tree: Path, patch: Path, tests: list[str]) -> str:
    """Run the tests of a bug with it planted. Returns what came of it, and the first test that failed."""
    code, said = run(tree, "git", "apply", patch)
    assert code == 0, f"{patch.name} does not apply: {said}"
    code, said = run(tree, sys.executable, *PYTEST, *tests)
    assert run(tree, "git", "apply", "-R", patch)[0] == 0
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", said, re.MULTILINE)
    result = {0: "NOT FOUND", 1: "found", None: "error: took too long"}.get(code, f"error: exit code {code}")
    return f"{result:<10} {failed[1] if failed else ''}"


def main() -> None:
    """Hunt the bugs that are asked for, and print a line for each."""
    bugs = {patch.stem: read(patch) for patch in sorted(FOLDER.glob("*.patch"))}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(bugs), metavar="NAME")
    parser.add_argument("--share", default="all", metavar="WORD", help="a seventh of the bugs, chosen by a word such as a date")
    options = parser.parse_args()
    results: list[str] = []
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        tree = Path(folder).resolve()
        copy_tree(tree)
        assert run(tree, sys.executable, "-c", WHERE)[1].strip() == str(tree / "runtime" / "__init__.py")
        for name in (name for name in options.names if record.is_in_share(name, options.share)):
            began = time.monotonic()
            results.append(hunt(tree, FOLDER / f"{name}.patch", bugs[name][1]))
            print(f"{name:<30} {results[-1]}  {time.monotonic() - began:.1f} s", flush=True)
    sys.exit(int(not all(result.startswith("found") for result in results)))


if __name__ == "__main__":
    main()
