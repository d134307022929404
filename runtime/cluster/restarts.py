"""How often a process may be started again. No I/O; the caller gives the time."""

from __future__ import annotations

from runtime import timeouts
from runtime.config import Restarts


def backoff(settings: Restarts, before: int) -> float:
    """Seconds until a process is started again that has been, `before` times within the window."""
    return min(settings.backoff * 2.0 ** min(before, 30), max(settings.backoff, timeouts.LONGEST_BACKOFF))


class Allowance:
    """Of one process, by its role's settings."""

    def __init__(self, settings: Restarts):
        self._settings = settings
        self._granted: list[float] = []

    def delay(self, now: float) -> float | None:
        """Seconds until the process that died at `now` may be started again; None when it may not be."""
        settings = self._settings
        self._granted = [then for then in self._granted if now - then < settings.window]
        if len(self._granted) >= settings.attempts:
            return None
        self._granted.append(now)
        return backoff(settings, len(self._granted) - 1)
