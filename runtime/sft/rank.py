"""Supervised fine-tuning, one rank: `python -m runtime.sft.rank CONFIG`, alone or started by `launcher.node.ranks`.

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
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from msgspec.structs import replace

from runtime import run_files, types
from runtime.cluster.topology import data_leaders
from runtime.config import Config, loading
from runtime.config.checks import alone
from runtime.data import prepared
from runtime.data.handlers import Problem, load_problems, report
from runtime.data.prepared import row_format_of, sources
from runtime.data.prompts import PromptStream, Share
from runtime.data.tokenizer import Tokenizer
from runtime.errors import SluiceError, UserError
from runtime.ledger import checkpoint
from runtime.ledger.checkpoint import Position
from runtime.process import os_process
from runtime.sft.conversations import SftRow, taught_rows
from runtime.telemetry.metrics import Metrics
from runtime.telemetry.trackers import Trackers
from runtime.trainer.backend import StepStatistics
from runtime.trainer.micro_batch import MicroBatch
from runtime.trainer.objective import Objective
from runtime.trainer.rank_group import join_group, require_memory
from runtime.trainer.rows import Rows, balance
from runtime.trainer.step import model_trainer
from runtime.types import GroupPayload, PolicyVersion, Sample, StepResult, TrainGroup


class SftDataset(NamedTuple):
    """The rows of each conversation of `data.train`. `stream` draws the conversations in order; `said` sums up the files."""

    rows: list[list[SftRow]]
    stream: PromptStream
    said: str


def read_lessons(config: Config, tokenizer: Tokenizer) -> SftDataset:
    """Read all conversations of `data.train`. The input is a row's prompt or chat, the reply its label. Raises UserError."""
    data = config.data
    problems: list[Problem] = []
    rows: list[list[SftRow]] = []
    shares: list[Share] = []
    dropped: Counter[str] = Counter()

    def encode(texts: list[str]) -> list[list[int]]:
        return [tokens.tolist() for tokens in tokenizer.encode_texts(texts)]

    for key, source in sources(data):
        if prepared.is_prepared(Path(source.path)):
            raise UserError(f"{key}: {source.path} has prompts made by sluice data prepare; name the files that it was made of")
        difficulty = data.curriculum.key if data.curriculum else ""
        found = load_problems(source.path, row_format_of(source, data), key, difficulty)
        chats = [[*each.messages, {"role": "assistant", "content": each.label}] for each in found.problems]
        encoded = taught_rows(tokenizer.template, encode, chats, tokenizer.stop_ids)
        short = [at for at, each in enumerate(encoded) if all(len(row.tokens) <= config.sft.max_tokens for row in each)]
        dropped.update({**found.dropped, f"conversation over {config.sft.max_tokens} tokens": len(encoded) - len(short)})
        if not short:
            raise UserError(
                f"{key}: {source.path}: no conversation has {config.sft.max_tokens} tokens or less; see sft.max_tokens"
            )
        problems += [found.problems[at] for at in short]
        rows += [encoded[at] for at in short]
        shares.append(Share(len(short), source.weight))
    left_out = {reason: count for reason, count in dropped.items() if count}
    stream = PromptStream(problems, config.run.seed, data.shuffle, shares, data.curriculum)
    return SftDataset(rows, stream, report(len(problems) + sum(left_out.values()), left_out))


# ---- Objective: it uses the steps and engines of reinforcement learning (`trainer.step`), with groups from a dataset.

PREFIX = "sft/"


class SupervisedObjective(Objective):
    """`-log π(y_t | y_<t)`, the mean over all taught tokens of the step: the cross-entropy, in nats a token."""

    role, prefix = "trainer", PREFIX
    averaged = f"{PREFIX}loss"

    def columns(self, rows: Rows, step: int, statistics: StepStatistics) -> tuple[dict[str, np.ndarray], np.ndarray]:
        statistics.total(f"{PREFIX}tokens", float(rows.mask.sum()))
        return {}, np.ones(len(rows.length), bool)

    def per_token_output(self, batch: MicroBatch, outputs: torch.Tensor) -> torch.Tensor:
        return self._backend.token_logprobs(outputs, batch, 1.0, entropy_gradient=False)[0]

    def loss(self, batch: MicroBatch, outputs: torch.Tensor, statistics: StepStatistics) -> torch.Tensor:
        total = -(batch.grid(self.per_token_output(batch, outputs)) * batch.mask).sum()
        statistics.mean(self.averaged, total.detach(), batch.mask.sum())
        return total


supervised_trainer = partial(model_trainer, SupervisedObjective)


def taught_group(number: int, rows: Sequence[SftRow], shared: int) -> TrainGroup:
    """Return a group of `rows`. The rows have the same first `shared` tokens, which are not taught and are computed once."""
    samples = [
        Sample(
            tokens=row.tokens[shared:],
            loss_mask=row.mask[shared:].astype(np.uint8),
            logprobs=np.zeros(len(row.tokens) - shared, np.float32),
            versions=np.zeros(len(row.tokens) - shared, np.int64),
            finish_reason="stop",
        )
        for row in rows
    ]
    return TrainGroup(
        group_id=number,
        tokens=sum(len(row.tokens) for row in rows),
        rewards=np.zeros(len(rows), np.float32),
        valid=np.ones(len(rows), np.uint8),
        payload=types.encode(GroupPayload.of(number, rows[0].tokens[:shared], samples)),
    )


class SftRank:
    """Runs steps from the beginning, or from the checkpoint `run.resume`, to the last one or a signal. Then it saves a
    checkpoint and the model. All ranks make the same calls in the same order."""

    def __init__(self, config: Config, rank: int, world_size: int, device: torch.device):
        """Load data and model. Raises UserError if the configuration, the data or the model's folder is wrong."""
        config = alone(config)
        self.stopped = False  # whether to end after the present step: the user has sent SIGTERM
        self._rows, self._stream, self._said = read_lessons(config, Tokenizer.of(config))
        self._wanted = config.sft.epochs * len(self._rows)  # conversations
        self._steps = math.ceil(self._wanted / config.sft.batch_size)
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
                self._print_event("progress", loss)
            if every and step % every == 0:
                self._save()
        if self._trainer.step > self._saved:
            self._save()
        self._trainer.export(self._folder / run_files.MODEL)
        if trackers is not None:
            await trackers.close()
            self._print_event("done", loss, said=self._said)

    def _step(self) -> StepResult:
        self._trainer.begin_step(self._trainer.step)
        self._trainer.accumulate(self._share(), last=True)
        return self._trainer.apply()

    def _share(self) -> list[TrainGroup]:
        """Return this rank's rows of the next conversations. Ranks with different shares of the data have different rows."""
        count = min(self._config.sft.batch_size, self._wanted - self._stream.state().position)
        rows = [row for _ in range(count) for row in self._rows[self._stream.draw().index]]
        parts = balance([len(row.tokens) for row in rows], self._shares)
        backend = self._trainer.backend
        own = parts[backend.share] if backend.leads else []
        return [taught_group(at, [rows[at]], int(rows[at].mask.argmax())) for at in own]

    def _metrics(self, result: StepResult, seconds: float) -> Metrics:
        passes = self._stream.state().position / len(self._rows)
        speed = result.metrics[f"{PREFIX}tokens"] / seconds
        return {**result.metrics, f"{PREFIX}epoch": passes, f"{PREFIX}tps": speed, "timing/update": result.seconds}

    def _save(self) -> None:
        """Save a checkpoint, whole or not at all."""
        folder, first = checkpoint.folder_for(self._folder, self._trainer.step), self._info.rank == 0
        with checkpoint.as_storage_full(folder):
            partial = checkpoint.begin(folder) if first else checkpoint.partial_of(folder)
            self._info.largest([0])  # no rank writes before the folder exists
            self._trainer.save(str(partial))
            if first:
                version, stream = PolicyVersion(step=self._trainer.step), self._stream.state()
                checkpoint.complete(partial, folder, Position(version=version, stream=stream, trained=[]))
                checkpoint.prune(self._folder, self._config.checkpoint.keep, ())
        self._saved = self._trainer.step

    def _print_event(self, event: str, loss: float, **more: str) -> None:
        line = {"event": event, "step": self._trainer.step, "steps": self._steps, "loss": loss, **more}
        print(json.dumps(line), flush=True)


def main(path: str) -> int:
    """Run the fine-tuning. Return the exit code: 2 for a user's mistake, 1 for a fault. Each error is a line on stderr."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        config = loading.load(path)
        rank, world_size = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
        device = join_group("trainer", config.services.trainer, world_size, config.deadlines.train)
        require_memory("trainer", config, config.model.path, device)
        tuning = SftRank(config, rank, world_size, device)

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
