"""What is told of an exception that an agent raised. The standard library alone."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

MOST = 2000  # characters

_printed: set[tuple[str, str]] = set()  # kinds of exceptions, and where they were raised


def told(error: BaseException) -> str:
    """Its kind, what it says, and the innermost line of the agent's own code that it came through, where there is one:
    "KeyError: 'x' (FILE.py, line 7)". What an agent raises to say of itself what failed says that alone."""
    from sluice.agents.episode import DataError, InfrastructureError

    said = f"{type(error).__name__}: {error}"[:MOST]
    place = "" if isinstance(error, (DataError, InfrastructureError)) else _place(error)
    return f"{said} ({place})" if place else said


def print_once(episode: str, error: BaseException) -> None:
    """The traceback to standard error, of the first of its kind from its line in this process: what it says may differ each
    time."""
    from sluice.agents.episode import DataError, InfrastructureError

    which = type(error).__name__, _place(error)
    if isinstance(error, (DataError, InfrastructureError)) or which in _printed:
        return
    _printed.add(which)
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    sys.stderr.write(f"episode {episode} failed\n{''.join(lines)}")  # at once: others write to the same log
    sys.stderr.flush()


def _place(error: BaseException) -> str:
    own = Path(sys.path[0])  # the folder of the agent's file
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = Path(frame.f_code.co_filename).resolve()
        if file.suffix == ".py" and file.is_relative_to(own) and "site-packages" not in file.parts:
            place = f"{file.relative_to(own)}, line {line}"
    return place
