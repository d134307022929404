"""JSON files of strangers: models, tokenizers and checkpoints have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from runtime.errors import UserError


def read_object(path: Path, where: str) -> dict[str, Any]:
    """The object in a file; `where` begins the errors. Raises UserError when the file cannot be read, and when it is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{where}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{where}: is not a JSON object")
    return value
