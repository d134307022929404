"""TRL's GRPOTrainer beside a run of Sluice's: what `sluice bench train` measures of it, in an environment that has trl."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.inputs import answer_pattern
from benchmarks.worker import Measured
from runtime.config import Config
from runtime.data.prepared import training_prompts
from runtime.data.tokenizer import Tokenizer
from runtime.errors import ServiceFault, UserError

DEFAULT_PYTHON = Path(".venv-trl/bin/python")
TRIAL = Path(__file__).with_name("trl_trial.py")
MISSING = f"TRL is left out: there is no {DEFAULT_PYTHON}; make install-trl makes it, --trl-python PATH names another"
DEADLINE = 900.0  # seconds of one trial


def interpreter(given: Path | None) -> str | None:
    """The interpreter that has trl; None where none is given and the default is not there. Raises UserError."""
    if given is None:
        return str(DEFAULT_PYTHON) if shutil.which(DEFAULT_PYTHON) else None
    if shutil.which(given) is None:
        raise UserError(f"--trl-python: '{given}' is not an executable")
    return str(given)


def order(config: Config, threads: int, warm: int, steps: int) -> dict[str, Any]:
    """What the trial is asked for: the same model, prompts, batch, lengths and optimizer."""
    prompts = training_prompts(config.data, Tokenizer(config.model.path))
    return {
        "model": str(Path(config.model.path).resolve()),
        "questions": [problem.messages[0]["content"] for problem in prompts.problems],
        "answer": answer_pattern(config),
        "labels": [problem.label for problem in prompts.problems],
        "tokens": [tokens.tolist() for tokens in prompts.tokens],
        "samples": config.training.groups_per_step * config.sampling.group_size,
        "group_size": config.sampling.group_size,
        "max_new_tokens": config.sampling.max_new_tokens,
        "kl_coefficient": config.algorithm.kl_coefficient,
        "learning_rate": config.training.optimizer.learning_rate,
        "betas": list(config.training.optimizer.betas),
        "threads": threads,
        "warm": warm,
        "steps": steps,
    }


class TrlMeasured(Measured):
    """TRL's `count` samples in `seconds`; `peak_bytes` are resident.

    `points`: seconds since training began and mean reward of each step.
    """

    peak_bytes: int
    points: list[tuple[float, float]]


async def trial(config: Config, python: str, threads: int, warm: int, steps: int) -> TrlMeasured:
    """Measure `steps` steps after `warm` ones, in a process of its own. Raises ServiceFault with its last line of errors."""
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    pipe = asyncio.subprocess.PIPE
    # -I: neither PYTHONPATH nor the script's folder, whose modules would hide some of that environment's, is searched.
    command = (python, "-I", str(TRIAL))
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe, env=env)
    try:
        asked = json.dumps(order(config, threads, warm, steps)).encode()
        out, errors = await asyncio.wait_for(process.communicate(asked), DEADLINE)
    except TimeoutError:
        raise ServiceFault("bench", "trl", f"did not end within {DEADLINE:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        if process.returncode < 0:
            name = signal.Signals(-process.returncode).name
            raise ServiceFault("bench", "trl", f"was killed by {name}; the kernel sends SIGKILL where memory runs out")
        said = errors.decode(errors="replace").split("\n")
        raise ServiceFault("bench", "trl", next((line for line in reversed(said) if line.strip()), "ended without an answer"))
    return msgspec.json.decode(out.splitlines()[-1], type=TrlMeasured)
