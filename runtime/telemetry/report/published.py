"""Published throughput of the same model, to stand beside a run's.

A model is known by its dimensions, as its config.json has them, so that a fine-tuned or renamed one is found too, and one that
only bears the name is not; by the name of its folder where there is no config.json to read, or where the dimensions of the
published model are not known here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

ROWS = Path(__file__).parent / "published.yaml"

Dimensions = tuple[int, int, int]  # hidden_size, num_hidden_layers, vocab_size

_DIMENSIONS: Mapping[str, Dimensions] = {
    "Qwen2.5-7B": (3584, 28, 152064),
    "Qwen2.5-32B": (5120, 64, 152064),
    "Qwen3-8B": (4096, 36, 151936),
    "Qwen3-32B": (5120, 64, 151936),
    "Qwen3-30B-A3B": (2048, 48, 151936),
}


class PublishedFigure(msgspec.Struct, kw_only=True, frozen=True):
    """A row of published.yaml. Tokens a second and device count those of prompts and replies; None: not published."""

    name: str
    algorithm: str
    model: str
    hardware: str
    global_batch: int | None = None  # prompts a step
    group_size: int | None = None
    max_prompt_tokens: int | None = None
    max_new_tokens: int | None = None
    e2e_tps_per_device: float | None = None
    source: str = ""


def load(path: Path = ROWS) -> list[PublishedFigure]:
    return msgspec.convert(yaml.safe_load(path.read_text(encoding="utf-8")), list[PublishedFigure])


def dimensions(described: Mapping[str, Any]) -> Dimensions | None:
    """Of a config.json; None when it is none of a language model."""
    found = [described.get(key) for key in ("hidden_size", "num_hidden_layers", "vocab_size")]
    hidden, layers, vocabulary = (value if isinstance(value, int) else 0 for value in found)
    return (hidden, layers, vocabulary) if hidden and layers and vocabulary else None


def matching(rows: Sequence[PublishedFigure], described: Mapping[str, Any] | None, path: str) -> list[PublishedFigure]:
    """The rows of the model whose config.json is `described` (None: there is none), in the folder `path`."""
    sizes = dimensions(described) if described is not None else None
    return [row for row in rows if _same(row.model, sizes, path)]


def _same(model: str, sizes: Dimensions | None, path: str) -> bool:
    known = _DIMENSIONS.get(model)
    if sizes is not None and known is not None:
        return sizes == known
    return any(re.match(rf"{re.escape(model)}(?![\w.])", part, re.IGNORECASE) for part in Path(path).parts)
