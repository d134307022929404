"""Sandboxes (work under way)."""

from __future__ import annotations

from runtime.config.base import Section


class Sandbox(Section, frozen=True):
    """Where programs run that are not to be trusted."""
