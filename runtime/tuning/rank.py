"""Supervised fine-tuning, one rank of it: `python -m runtime.tuning.rank CONFIG`, alone or started by `launcher.node.ranks`.

Every rank reads the conversations, and computes its share of each step's. Rank 0 logs the metrics, and prints one JSON object
a line: `{"event": "progress", "step", "steps", "loss"}`, at the end `{"event": "done", "step", "steps", "loss", "said"}`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import signal
import sys
import time
from pathlib import Path

import torch
from msgspec.structs import replace

from runtime import run_files
from runtime.cluster.topology import data_leaders
from runtime.config import Config, loading
from runtime.config.checks import alone
from runtime.data.tokenizer import Tokenizer
from runtime.errors import SluiceError, UserError
from runtime.ledger import checkpoint
from runtime.ledger.position import Position
from runtime.process import os_process
from runtime.telemetry.metrics import Metrics
from runtime.telemetry.trackers import Trackers
from runtime.trainer.rank import join_group, require_memory
from runtime.trainer.rows import balance
from runtime.tuning.lessons import read_lessons
from runtime.tuning.objective import PREFIX, supervised_trainer, taught_group
from runtime.types import PolicyVersion, StepResult, TrainGroup


class TuneRank:
    """Steps from the beginning, or the checkpoint `run.resume`, to the last one or to a signal; then a checkpoint and the
    model. All ranks make the same calls in the same order."""

    def __init__(self, config: Config, rank: int, world_size: int, device: torch.device):
        """Raises UserError for what the configuration, the data or the model's folder gets wrong."""
        config = alone(config)
        self.stopped = False
        """Whether the user wants it to end: after the step under way."""
        self._lessons = read_lessons(config, Tokenizer.of(config))
        self._stream = self._lessons.stream(config)
        self._wanted = config.tune.epochs * len(self._lessons.problems)  # conversations
        self._steps = math.ceil(self._wanted / config.tune.batch_size)
        self._config = replace(config, training=replace(config.training, steps=self._steps))
        self._folder = Path(config.run.dir)
        self._trainer = supervised_trainer(self._config, rank=rank, world_size=world_size, device=device)
        self._info = self._trainer.backend.rank_info
        self._shares = len(data_leaders(config.services.trainer))
        self._saved = -1
        if resume := checkpoint.resolve(config.run.resume, self._folder, sums=False):
            self._stream.restore(checkpoint.read_position(Path(resume)).stream)
            self._trainer.load(resume)
            self._saved = self._trainer.step

    async def run(self) -> None:
        trackers = Trackers(self._config, self._folder) if self._info.rank == 0 else None
        every, loss = self._config.checkpoint.every, math.nan
        while self._trainer.step < self._steps and not self._info.largest([int(self.stopped)])[0]:
            begun = time.monotonic()
            result = self._step()
            step, loss = self._trainer.step, result.metrics.get(f"{PREFIX}loss", math.nan)
            if trackers is not None:
                await trackers.log(step, self._metrics(result, time.monotonic() - begun))
                self._tell("progress", loss)
            if every and step % every == 0:
                self._save()
        if self._trainer.step > self._saved:
            self._save()
        self._export()
        if trackers is not None:
            await trackers.close()
            self._tell("done", loss, said=self._lessons.said)

    def _step(self) -> StepResult:
        self._trainer.begin_step(self._trainer.step)
        self._trainer.accumulate(self._share(), last=True)
        return self._trainer.apply()

    def _share(self) -> list[TrainGroup]:
        """This rank's rows of the next conversations, of which no two ranks that are given data have one."""
        count = min(self._config.tune.batch_size, self._wanted - self._stream.state().position)
        rows = [row for _ in range(count) for row in self._lessons.rows[self._stream.draw().index]]
        parts = balance([len(row.tokens) for row in rows], self._shares)
        backend = self._trainer.backend
        own = parts[backend.share] if backend.leads else []
        return [taught_group(at, [rows[at]], int(rows[at].mask.argmax())) for at in own]

    def _metrics(self, result: StepResult, seconds: float) -> Metrics:
        passes = self._stream.state().position / len(self._lessons.problems)
        speed = result.metrics[f"{PREFIX}tokens"] / seconds
        return {**result.metrics, f"{PREFIX}epoch": passes, f"{PREFIX}tps": speed, "timing/update": result.seconds}

    def _save(self) -> None:
        """A checkpoint, whole or not at all."""
        folder, first = checkpoint.folder_for(self._folder, self._trainer.step), self._info.rank == 0
        with checkpoint.full_disk_told(folder):
            partial = checkpoint.begin(folder) if first else checkpoint.partial_of(folder)
            self._info.largest([0])  # nobody writes before the folder is there
            self._trainer.save(str(partial))
            if first:
                version, stream = PolicyVersion(step=self._trainer.step), self._stream.state()
                checkpoint.complete(partial, folder, Position(version=version, stream=stream, trained=[]))
                checkpoint.prune(self._folder, self._config.checkpoint.keep, ())
        self._saved = self._trainer.step

    def _export(self) -> None:
        folder = self._folder / run_files.MODEL
        if self._info.rank:
            self._trainer.backend.export(folder)
            return
        with checkpoint.atomic_folder(folder) as partial:
            self._trainer.backend.export(partial)

    def _tell(self, event: str, loss: float, **more: str) -> None:
        told = {"event": event, "step": self._trainer.step, "steps": self._steps, "loss": loss, **more}
        print(json.dumps(told), flush=True)


def main(path: str) -> int:
    """The exit code: 2 for what the user can mend, 1 for a fault, each of which is a line."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        config = loading.load(path)
        rank, world_size = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
        device = join_group("trainer", config.services.trainer, world_size, config.deadlines.train)
        require_memory("trainer", config, config.model.path, device)
        tuning = TuneRank(config, rank, world_size, device)

        def stop(*_: object) -> None:
            tuning.stopped = True

        signal.signal(signal.SIGTERM, stop)
        asyncio.run(tuning.run())
    except SluiceError as error:
        os_process.say_errors(str(error).splitlines())
        return 2 if isinstance(error, UserError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
