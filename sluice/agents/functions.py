"""Tools of an agent: Python functions, whose schemas are their signatures, and whatever else has schemas and can be called."""

from __future__ import annotations

from typing import Any


class Toolset:
    """Several tools as one: `schemas`, as the `tools` of a request; `call`, which gives a tool's answer as text."""

    def __init__(self, tools: Any, seconds: float):
        """`seconds`: of one call."""
        self.schemas: list[dict[str, Any]] = []
        self._tools, self._seconds = tools, seconds


def toolset(tools: Any, seconds: float) -> Toolset:
    return Toolset(tools, seconds)
