"""The critic role: an SPMD group of one or more ranks. `python -m services.critic`, alone or as a rank."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from runtime.config import Config
from services import process
from services.model_service import SpmdService

if TYPE_CHECKING:
    from runtime.trainer.rank import CriticRank


def make_rank(config: Config, rank: int, world_size: int) -> CriticRank:
    from runtime.trainer import rank as ranks

    return ranks.make_rank(ranks.CriticRank, config, rank, world_size)


if __name__ == "__main__":
    process.main(partial(SpmdService, "critic", make_rank))
