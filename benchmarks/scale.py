"""`sluice bench scale`: what the coordinator costs with up to 10,000 rollouts, and what a thousand cards wait for.

Both are simulated: the coordinator and its ledger are the real ones, on a virtual clock (`runtime/simulation`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from benchmarks.compared import Compared
from runtime import config as schema
from runtime.config import Config
from runtime.errors import DeadlineExceeded, ServiceFault, UserError
from runtime.simulation.calibration import assumed
from runtime.simulation.cluster import BYTES
from runtime.simulation.engine import ReplyLengths
from runtime.simulation.simulate import Prediction, simulated
from runtime.telemetry.shown import LiteralTable
from runtime.telemetry.startup import collect_rarely
from services.rpc.client import command_deadline
from sluice import start

TRIALS = ((10, 1000), (100, 1000), (1000, 100), (10_000, 12))  # replicas and steps
QUICK = ((10, 200), (100, 100))
DEADLINE = 1800.0  # seconds of one trial
CARDS_STEPS = 8
PARAMETERS = 32.8e9  # Qwen2.5-32B
REPLIES = Path("data") / "qwen_math_cot_100" / "math_cot_100.jsonl"  # 8 real replies to each of 100 problems
LETTERS = 3.0  # of a token, in such replies
FOUR = schema.RolloutParallel(tensor=4)
MEAN_TOKENS = 6000.0  # to which these are stretched: the lengths of a policy that has learnt to reason
MOST_TOKENS = 16_384


class Layout(Struct, frozen=True):
    """1,024 cards, unless `times` makes everything as much larger. `tokens`: the mean length of a reply."""

    name: str
    rollouts: int = 96  # of four cards each
    trainer: int = 480
    reference: int = 160
    staleness: int = 1
    times: int = 1
    tokens: float = MEAN_TOKENS

    @property
    def cards(self) -> int:
        return self.times * (4 * self.rollouts + self.trainer + self.reference)


LAYOUTS = (
    Layout("as it is"),
    Layout("η 0", staleness=0),
    Layout("η 2", staleness=2),
    Layout("a quarter of the rollouts more", rollouts=120),
    Layout("a quarter of the trainer more", trainer=600),
    Layout("replies of 400 tokens", tokens=400.0),
    Layout("4 times as many cards", times=4),
    Layout("4 times as many, replies of 400 tokens", times=4, tokens=400.0),
)


class CardsFigures(Struct):
    name: str
    cards: int
    samples: int  # of a step
    megabytes: float  # of finished groups, each second
    messages: float  # to the coordinator, each second
    prediction: Prediction


class ScaleReport(Struct):
    trials: list[dict[str, float]]
    cards: list[CardsFigures]


async def measure(
    data: Path, show: Callable[[str], None] = lambda line: None, replicas_and_steps: Sequence[tuple[int, int]] = TRIALS
) -> ScaleReport:
    """`data`: the folder that holds `REPLIES`. Raises UserError, ServiceFault."""
    groups = _reply_lengths(data / REPLIES)
    trials = []
    for replicas, steps in replicas_and_steps:
        show(f"{replicas:,} replicas")
        trials.append(await _trial(replicas, steps))
    collect_rarely()
    cards = []
    for layout in LAYOUTS:
        show(f"{layout.cards:,} cards: {layout.name}")
        cards.append(_simulated(layout, groups))
    return ScaleReport(trials, cards)


async def _trial(replicas: int, steps: int) -> dict[str, float]:
    child = await asyncio.create_subprocess_exec(
        *start.command("benchmarks.scale_trial", str(replicas), str(steps)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        said, _ = await asyncio.wait_for(child.communicate(), DEADLINE)
    except TimeoutError:
        raise DeadlineExceeded("bench", "scale", f"{replicas} replicas did not end", DEADLINE) from None
    finally:
        if child.returncode is None:
            child.terminate()
            await child.wait()
    if child.returncode:
        raise ServiceFault("bench", "scale", f"{replicas} replicas: the trial ended with {child.returncode}")
    return msgspec.json.decode(said, type=dict[str, float])


def _reply_lengths(path: Path) -> list[list[float]]:
    """Of each problem's replies, in tokens, roughly."""
    if not path.is_file():
        raise UserError(f"--data: {path.parents[2]} holds no {REPLIES}")
    lines = [msgspec.json.decode(line) for line in path.read_bytes().splitlines() if line]
    return [[len(code) / LETTERS for code in line["code"]] for line in lines]


def _configured(layout: Layout) -> Config:
    """GRPO with 16 replies to each of 1,024 problems a step, the trainer and the reference over all of their cards."""
    return Config(
        run=schema.Run(name="cards", dir="", resume=""),
        sampling=schema.Sampling(group_size=16, max_new_tokens=MOST_TOKENS),
        rewards=schema.Rewards(rules=[schema.Rule(name="gsm8k")], workers=64 * layout.times),
        algorithm=schema.Algorithm(kl_coefficient=0.001),
        training=schema.Training(staleness=layout.staleness, groups_per_step=1024 * layout.times),
        services=schema.Services(
            rollout=schema.Rollout(replicas=layout.times * layout.rollouts, max_num_seqs=256, parallel=FOUR, engine="vllm"),
            trainer=schema.Trainer(processes=layout.times * layout.trainer, engine="megatron"),
            reference=schema.ReferenceScorer(processes=layout.times * layout.reference, engine="megatron"),
        ),
        deadlines=schema.Deadlines(generate=3600.0, score=3600.0, train=7200.0),
        trackers=[],
    )


def _simulated(layout: Layout, groups: list[list[float]]) -> CardsFigures:
    config = _configured(layout)
    mean = sum(map(sum, groups)) / sum(map(len, groups))
    stretch = layout.tokens / mean
    lengths = ReplyLengths([[round(length * stretch) for length in group] for group in groups])
    costs = replace(assumed(config, "device", 0, PARAMETERS), reply_tokens=lengths, prompt_tokens=150)
    found = simulated(config, costs, command_deadline, CARDS_STEPS)
    rate = found.observed.samples_per_second
    messages = 4 * rate / config.sampling.group_size  # a group is generated, scored, annotated and trained
    samples = config.training.groups_per_step * config.sampling.group_size
    return CardsFigures(layout.name, layout.cards, samples, rate * layout.tokens * BYTES / 1e6, messages, found)


def compared(report: ScaleReport) -> list[Compared]:
    first, *others = ((trial["replicas"], trial["coordinator_seconds"] / trial["samples"]) for trial in report.trials)
    return [
        Compared(f"the coordinator's time a sample, {replicas:,.0f} / {first[0]:,.0f} replicas", [own / first[1]])
        for replicas, own in others
    ]


def render(report: ScaleReport) -> list[LiteralTable]:
    return [_trials_table(report.trials), _cards_table(report.cards)]


def _trials_table(trials: list[dict[str, float]]) -> LiteralTable:
    head = ("replicas", "steps", "coordinator, µs a sample", "of the first", "all, µs a sample", "memory, MB")
    table = LiteralTable(*head, "kB a sample alive", title="the coordinator with many rollouts")
    first = trials[0]["coordinator_seconds"] / trials[0]["samples"]
    for trial in trials:
        own, whole = (trial[name] / trial["samples"] for name in ("coordinator_seconds", "seconds"))
        memory = trial["memory"]
        row = (f"{1e6 * own:.1f}", f"{own / first:.2f}", f"{1e6 * whole:.0f}", f"{memory / 1e6:.0f}")
        table.add_row(f"{trial['replicas']:,.0f}", f"{trial['steps']:,.0f}", *row, f"{memory / trial['alive'] / 1e3:.1f}")
    return table


def _cards_table(cards: list[CardsFigures]) -> LiteralTable:
    head = ("", "cards", "samples/s", "s a step", "staleness", "busy: rollouts", "trainer", "reference", "coordinator")
    table = LiteralTable(*head, "messages/s", "MB/s", title="many cards")
    for one in cards:
        seen = one.prediction.observed
        figures = (f"{seen.samples_per_second:.0f}", f"{seen.seconds['step']:.0f}", f"{seen.staleness:.2f}")
        traffic = (f"{one.messages:.0f}", f"{one.megabytes:.0f}")
        table.add_row(one.name, f"{one.cards:,}", *figures, *_busy(one.prediction), *traffic)
    return table


def _busy(prediction: Prediction) -> Iterator[str]:
    for role in ("rollout", "trainer", "reference", "coordinator"):
        yield f"{fmean(prediction.busy[role]):.1%}"
