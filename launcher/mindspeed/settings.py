"""MindSpeed-RL's keys by role. Pure."""

from __future__ import annotations

from collections.abc import Collection

from launcher.importing.settings import Read, Setting, TranslatedSettings
from launcher.mindspeed.keys import SECTIONS, TABLE


class RoleSettings(TranslatedSettings):
    """Keys of a section, and those of a role, which several sections may have."""

    def __init__(self, read: Read, without: Collection[str]):
        super().__init__(TABLE, read, without)
        self._by_model = {(each.model, each.name): each for each in read.entries if each.model}

    def role(self, role: str, name: str) -> Setting:
        """A key of a role: its own section's, else that of all roles, else its model's, else the default."""
        shared, own = SECTIONS[self.format][role]
        named = [self._by_place.get((section, "model")) for section in (own, shared)]
        model = next((each.value for each in named if each is not None), "")
        chosen = [self._by_place.get((own, name)), self._by_place.get((shared, name)), self._by_model.get((model, name))]
        return self.setting(next((each for each in chosen if each is not None), None), own, name)
