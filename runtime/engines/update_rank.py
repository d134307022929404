"""One rank of a group under training, whichever model it trains: the engine, and the commands that trainer and critic share."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Generic, TypeVar

from msgspec.structs import replace

from runtime import checkpoint
from runtime.commands import Accumulate, Apply, BeginStep, Save
from runtime.config import Config
from runtime.engines.group_rank import GroupRank
from runtime.engines.train_base import UpdateEngine
from runtime.errors import InvalidMessage

Engine = TypeVar("Engine", bound=UpdateEngine)


class UpdateRank(GroupRank, Generic[Engine]):
    """A subclass adds the commands that are its own to `execute`."""

    def __init__(self, engine: Engine, config: Config, rank: int, world_size: int):
        super().__init__(config, rank, world_size, config.deadlines.train)
        self.engine = engine
        if config.run.resume:
            folder = Path(config.run.resume)
            self.version = checkpoint.read_position(folder).version
            engine.load(str(self.state(folder)))

    def state(self, folder: Path) -> Path:
        """Where in the checkpoint `folder` this role's state lies. Raises UserError when it is not there."""
        return folder

    def execute(self, command: Any) -> Any:
        if isinstance(command, Accumulate):
            self.engine.accumulate(command.groups)
        elif isinstance(command, BeginStep):
            self.engine.begin_step(command.step)
        elif isinstance(command, Apply):
            result = self.engine.apply()
            self.version = replace(self.version, step=command.step + 1)
            return result
        elif isinstance(command, Save):
            with checkpoint.full_disk_told(Path(command.folder)):
                self.engine.save(command.folder)
        else:
            raise InvalidMessage(f"a {self.role} takes no {type(command).__name__}")
        return None
