"""Cross-checks of what a configuration says of its data. No file of problems is opened: that is for the run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from runtime.config import Config
from runtime.data.chosen import sources
from runtime.data.prompt_types import MODEL, names
from runtime.errors import UserError


def data_faults(config: Config) -> Iterator[str]:
    """One line for each fault of section `data`, and of the chat template."""
    data = config.data
    named = [(key, source.path) for key, source in sources(data)]
    seen: set[Path] = set()
    for key, path in [*named, ("data.eval", data.eval)] if data.eval else named:
        if not Path(path).exists():
            yield f"{key}: '{path}' is not a file"
        elif Path(path).is_file() and Path(path).stat().st_size == 0:
            yield f"{key}: '{path}' is empty"
        elif key != "data.eval" and Path(path).resolve() in seen:
            yield f"{key}: '{path}' is there twice; give it more weight instead"
        seen.add(Path(path).resolve())
    if config.warmup is None:
        if not data.train:
            yield "data.train: missing; name a json, jsonl, parquet or arrow file, or give a warmup section"
        if config.evaluation.every and not data.eval:
            yield f"data.eval: missing; evaluation.every is {config.evaluation.every}"
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
