"""Cross-checks of what a configuration trains on and evaluates on: files, templates, evaluation sets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from runtime.config import Config
from runtime.data.chosen import sources
from runtime.data.prompt_types import MODEL, names
from runtime.errors import UserError
from runtime.evaluation.sets import evaluation_sets, set_faults


def data_faults(config: Config, trains: bool) -> Iterator[str]:
    """One line for each fault of section `data`, evaluation sets left out. `trains`: False for an evaluation alone."""
    data = config.data
    seen: set[Path] = set()
    for key, source in sources(data) if trains else []:
        yield from _path(key, source.path)
        if Path(source.path).resolve() in seen:
            yield f"{key}: '{source.path}' is there twice; give it more weight instead"
        seen.add(Path(source.path).resolve())
    if trains and not data.train and config.warmup is None:
        yield "data.train: missing; name a json, jsonl, parquet or arrow file, or give a warmup section"
    template = config.model.chat_template
    if template and not Path(template).is_file():
        yield f"model.chat_template: '{template}' is not a file"
    elif template and data.prompt_type != MODEL:
        yield f"model.chat_template: has no use with data.prompt_type {data.prompt_type}, only with {MODEL}"
    try:
        if data.prompt_type not in (known := names(data.prompt_type_path)):
            yield f"data.prompt_type: '{data.prompt_type}' is not one of {', '.join(known)}"
    except UserError as error:
        yield str(error)


def evaluation_faults(config: Config, trains: bool) -> Iterator[str]:
    """One line for each fault of the evaluation sets."""
    sets = evaluation_sets(config)
    if not sets and (config.warmup is None or config.data.train):  # otherwise the warm-up names one
        if not trains:
            yield "data.eval: missing; name a file to evaluate on, or several under evaluation.sets"
        elif config.evaluation.every:
            yield f"data.eval: missing; evaluation.every is {config.evaluation.every}, and there are no evaluation.sets"
    for found in sets:
        yield from _path(found.key, found.path)
    yield from set_faults(config)


def _path(key: str, path: str) -> Iterator[str]:
    if not Path(path).exists():
        yield f"{key}: '{path}' is not a file"
    elif Path(path).is_file() and Path(path).stat().st_size == 0:
        yield f"{key}: '{path}' is empty"
