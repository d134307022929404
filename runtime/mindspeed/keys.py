"""What becomes of each key of MindSpeed-RL's configuration: the table in `keys.yaml`, typed.

The table says which keys of ours a key of theirs decides; how values are translated is code (`translate.py`). Names have
underscores; theirs may have dashes.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import msgspec
import yaml

FILE = Path(__file__).parent / "keys.yaml"


class Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Exactly one of `to`, `ignored` and `refused` is given."""

    default: Any = None  # MindSpeed-RL's own
    to: list[str] = []  # mapped: our keys, by their paths, that it decides alone or together with others
    note: str = ""  # how, where that is not obvious; with its unit
    ignored: str = ""  # why it has no counterpart, and needs none
    refused: str = ""  # why a value other than `default` cannot be had here, and what to do instead


@functools.cache
def table() -> dict[str, dict[str, Key]]:
    """By section of their file (`rl_config`), then by key."""
    return msgspec.convert(yaml.safe_load(FILE.read_bytes()), dict[str, dict[str, Key]])


def named_there(path: str) -> list[str]:
    """The keys of MindSpeed-RL, as SECTION.KEY, that decide our key `path`."""
    return [f"{section}.{name}" for section, keys in table().items() for name, key in keys.items() if path in key.to]
