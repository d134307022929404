"""A run's folder as a run would have left it, of any size: ledger, payloads, metrics and spans, at times that are known."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from runtime import config, run_files, types
from runtime.config import Config, loading
from runtime.coordinator.buffer import Buffer
from runtime.ledger.journal import LedgerWriter, Ticket
from runtime.ledger.states import Mark
from runtime.models.tiny_model import write_tokenizer
from runtime.process.spans import CALLS, SUFFIX, WEIGHT_SYNC, SpanHeader, TracedSpan
from runtime.telemetry.critical_path import TRAINER
from runtime.telemetry.summary import TrainedTokenLog, TrainedTokens
from runtime.types import GeneratedGroup, GroupPayload, PolicyVersion, Sample, Scores

BEGAN = 1_790_000_000.0  # seconds since the epoch
STEP = 4.0  # seconds: generate 2, score 0.5, train 1, publish 0.5
PROMPT = "2+2="
HEADER_BYTES = 512


def reply_of(group: int, sample: int) -> str:
    """Each of a length of its own, and found by its text."""
    return f"reply {group}.{sample} " + "x" * (sample % 5)


def reward_of(group: int, sample: int) -> float:
    return float((group + sample) % 3)


def record(folder: Path, steps: int, groups: int = 2, samples: int = 2, replies: Sequence[str] = ()) -> Path:
    """`steps` steps of `groups` groups of `samples` replies. `replies`: those of the first group, in place of plain ones."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    settings = Config(
        run=config.Run(name="recorded", dir=str(folder)),
        model=config.Model(path=str(folder)),
        training=config.Training(steps=steps, groups_per_step=groups, staleness=1),
        sampling=config.Sampling(group_size=samples),
    )
    (folder / run_files.CONFIG).write_text(loading.to_yaml(settings))
    asyncio.run(_ledger(folder, steps, groups, samples, replies))
    _metrics(folder, steps, groups, samples)
    _spans(folder, steps, groups)
    _tokens(folder, steps, groups, samples)
    return folder


def _tokens(folder: Path, steps: int, groups: int, samples: int) -> None:
    """The trainer computed -0.5 for each, and a sample's number is its advantage."""
    log = TrainedTokenLog(folder, "trainer-0")
    for step in range(steps):
        places = [
            (group, at, position)
            for group in range(step * groups, (step + 1) * groups)
            for at in range(samples)
            for position in range(len(reply_of(group, at)))
        ]
        group, row, position = np.array(places, np.int64).T.copy()
        log.append(TrainedTokens(step, group, row, position, np.full(len(places), -0.5, np.float32), row.astype(np.float32)))


async def _ledger(folder: Path, steps: int, groups: int, samples: int, replies: Sequence[str]) -> None:
    ledger = await LedgerWriter.open(folder / run_files.LEDGER, 64 << 20)
    clock = [BEGAN]
    buffer = Buffer(needs=Mark.SCORED, groups_per_step=groups, staleness=1, journal=ledger, clock=lambda: clock[0])
    for step in range(steps):
        ids = range(step * groups, (step + 1) * groups)
        for seconds, stage in enumerate((0.0, 2.0, 0.5, 1.0, 0.5)):
            clock[0] += stage
            if seconds == 0:
                for group in ids:
                    buffer.admit(Ticket(group_id=group, problem=group, source="gsm8k", label="4", seed=group))
                    buffer.dispatch(group, f"rollout-{group % 2}")
            elif seconds == 1:
                for group in ids:
                    texts = replies if replies and group == 0 else [reply_of(group, at) for at in range(samples)]
                    buffer.generated(_generated(group, step, texts))
            elif seconds == 2:
                for group in ids:
                    count = len(replies) if replies and group == 0 else samples
                    rewards = np.array([reward_of(group, at) for at in range(count)], np.float32)
                    buffer.scored(Scores(group_id=group, rewards=rewards, valid=np.ones(count, np.uint8)))
                buffer.take(step, whole=True)
            elif seconds == 3:
                buffer.consume(step)
            else:
                buffer.commit(step + 1)
        await ledger.flush()
    await ledger.close()


def _generated(group: int, step: int, texts: Sequence[str]) -> GeneratedGroup:
    tokens = [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]
    rows = [
        Sample(
            tokens=each,
            loss_mask=np.ones(len(each), np.uint8),
            logprobs=np.full(len(each), -0.25, np.float32),
            versions=np.full(len(each), PolicyVersion(0, step).pack(), np.int64),
            finish_reason="stop",
        )
        for each in tokens
    ]
    prompt = np.frombuffer(PROMPT.encode(), np.uint8).astype(np.int32)
    return GeneratedGroup(
        group_id=group,
        prompt_tokens=len(prompt),
        response_tokens=[len(each) for each in tokens],
        truncated=0,
        oldest=PolicyVersion(0, step),
        newest=PolicyVersion(0, step),
        payload=types.encode(GroupPayload.of(group, prompt, rows)),
    )


def _metrics(folder: Path, steps: int, groups: int, samples: int) -> None:
    with (folder / run_files.METRICS).open("w") as file:
        for step in range(1, steps + 1):
            point = {
                "step": step,
                "time": BEGAN + STEP * step,
                "timing/all": STEP,
                "samples": groups * samples,
                "score/mean": step / steps,
                "staleness/mean": 0.0,
                "staleness/max": 0.0,
                "staleness/histogram": {"0": groups * samples},
                "weight_sync/seconds": 0.5,
                "queue/depth": 2 * groups,
            }
            file.write(json.dumps(point) + "\n")


def _spans(folder: Path, steps: int, groups: int) -> None:
    found: dict[str, list[TracedSpan]] = {"rollout-0": [], "rollout-1": [], "reward-0": [], TRAINER: []}
    for step in range(steps):
        begin = BEGAN + STEP * step
        for rollout in ("rollout-0", "rollout-1"):
            found[rollout].append(TracedSpan("decode", begin, begin + 2.0, "engine"))
            found[rollout].append(TracedSpan("swap", begin + 3.5, begin + 4.0, WEIGHT_SYNC, step=step + 1))
            found[rollout].append(TracedSpan("CommitWeights", begin + 3.5, begin + 4.0, CALLS, step=step + 1))
        for group in range(step * groups, (step + 1) * groups):
            found[f"rollout-{group % 2}"].append(TracedSpan("Generate", begin, begin + 2.0, CALLS, group))
            found["reward-0"].append(TracedSpan("Score", begin + 2.0, begin + 2.5, CALLS, group))
        found[TRAINER].append(TracedSpan("backward", begin + 2.5, begin + 3.5, "engine"))
    (folder / run_files.SPANS).mkdir()
    for process, spans in found.items():
        write_spans(folder, SpanHeader(process, 0, 0, 1, "host"), spans)


def write_spans(folder: Path, header: SpanHeader, spans: Sequence[TracedSpan]) -> None:
    """The file of one start of a process."""
    first = msgspec.json.encode(header).ljust(HEADER_BYTES - 1) + b"\n"
    lines = b"".join(msgspec.json.encode(span) + b"\n" for span in spans)
    (folder / run_files.SPANS / f"{header.process}.{header.rank}.{header.incarnation}{SUFFIX}").write_bytes(first + lines)
