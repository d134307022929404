"""The modules that samples pass, from their prompt to published weights: those with a function called while a run trains.

`python -m tests.sample_path [--most MODULES LINES] [key=value ...]` trains the quickstart for some steps in real processes.
Each process notes its calls (`sys.setprofile`). The command prints the modules of the product that were entered between the
second step's end and the last's, with their lines. What only starts, ends or shows a run (`launcher/`, `runtime/telemetry/`) is
not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
STEPS = 8
NOTES = """
import atexit, json, os, sys, threading, time
calls, root, folder = {}, os.environ["NOTED_ROOT"], os.environ["NOTED_FOLDER"]

def note(frame, event, argument):
    if event == "call":
        file = frame.f_code.co_filename
        if file.startswith(root) and frame.f_code.co_name != "<module>":
            calls.setdefault(file, set()).add(int(time.time() * 10))

def write():
    path = os.path.join(folder, f"{os.getpid()}.json")
    with open(path + ".new", "w") as file:
        json.dump({name: sorted(times) for name, times in list(calls.items())}, file)
    os.replace(path + ".new", path)

atexit.register(write)
threading.setprofile(note)
sys.setprofile(note)
"""


def entered(folder: Path, overrides: list[str]) -> set[str]:
    """The files, relative to the root, that were entered in a tenth of a second which lies whole in the window."""
    (folder / "sitecustomize.py").write_text(NOTES)
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "NOTED_ROOT": f"{ROOT}{os.sep}", "NOTED_FOLDER": str(folder)}
    settings = [f"run.dir={folder / 'runs'}", f"training.steps={STEPS}", "evaluation.every=0", *overrides]
    command = [sys.executable, "-m", "launcher.cli", "train", str(ROOT / "configs" / "quickstart.yaml"), *settings]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=600, stdout=subprocess.DEVNULL)
    (file,) = folder.glob("runs/metrics.jsonl")
    written = [json.loads(line) for line in file.read_text().splitlines()]
    times = [line["time"] for line in written if "actor/lr" in line]
    start, end = sorted(times)[1] * 10, sorted(times)[-1] * 10 - 1  # a call is noted by the tenth of a second that it is in
    noted = [json.loads(each.read_text()) for each in folder.glob("*.json")]
    return {name[len(str(ROOT)) + 1 :] for calls in noted for name, at in calls.items() if any(start < t <= end for t in at)}


def lines(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


def main() -> None:
    """Print the modules, and end with status 1 where they or their lines are more than `--most`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--most", type=int, nargs=2, default=(sys.maxsize, sys.maxsize), metavar=("MODULES", "LINES"))
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        names = sorted(entered(Path(folder), options.overrides))
    names = [name for name in names if name.startswith(("services/", "runtime/")) and "telemetry" not in name]
    for name in names:
        print(f"{lines(ROOT / name):5} {name}")
    found = len(names), sum(lines(ROOT / name) for name in names)
    print(f"{found[0]} modules, {found[1]} lines")
    if found[0] > options.most[0] or found[1] > options.most[1]:
        sys.exit(f"a sample passes {found[0]} modules of {found[1]} lines, where {options.most} are allowed")


if __name__ == "__main__":
    main()
