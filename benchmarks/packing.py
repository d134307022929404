"""`sluice bench packing`: real tokens/s of the embedded trainer on packed sequences, and of the same model on padded rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path

import numpy as np
from msgspec import Struct, structs
from msgspec.structs import replace

from benchmarks.compared import Compared
from benchmarks.inputs import bench_config
from benchmarks.packing_trial import APART, BRANCHES, PACKED, SORTED, TREES, UNSORTED, WAYS, cut
from benchmarks.random_groups import GroupLengths, draw_lengths
from benchmarks.worker import Measured, Worker, total
from runtime.config import Config
from runtime.models.forward import starts, tree_paths
from runtime.models.tiny_model import Shape
from runtime.telemetry.shown import LiteralTable
from runtime.trainer.micro_batch import cut_trees


class PackingShape(Struct, frozen=True):
    """A model to measure with: a Qwen2 of this size. `vocabulary`: 0 is the tokenizer's."""

    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    intermediate_size: int
    vocabulary: int = 0

    @property
    def name(self) -> str:
        return f"{self.layers} layers of {self.hidden_size}"

    def bench_config(self, folder: Path) -> Config:
        """The bench's configuration for this model, made under `folder` unless it lies there."""
        shape = structs.asdict(self)
        vocabulary = shape.pop("vocabulary")
        return bench_config(folder / f"{self.layers}x{self.hidden_size}", Shape(**shape), vocabulary)


QUICKSTART = PackingShape(128, 4, 4, 2, 384)
LARGER = PackingShape(256, 6, 8, 4, 768)


class PackingSettings(Struct, frozen=True):
    shapes: tuple[PackingShape, ...] = (QUICKSTART, LARGER)
    budgets: tuple[int, ...] = (8192, 2048)  # training.max_tokens_per_microbatch
    rounds: int = 2
    seconds: float = 2.0  # of one measure at least; it ends with a whole pass over the batches
    prompt_tokens: int = 128  # at most, as are the next
    reply_tokens: int = 512


FULL = PackingSettings()
QUICK = PackingSettings(shapes=(QUICKSTART,), budgets=(8192,))


class Waste(Struct):
    """Of all batches. `linear`, `attention`: padding over all tokens computed, in the linear layers and in attention.
    `computed`: tokens that the linear layers compute over real ones, of which a prompt counts once a sample."""

    linear: float
    attention: float
    computed: float


class Way(Struct):
    tokens_per_second: float  # real tokens, prompt and reply of each sample, without padding
    waste: Waste


class PackingCase(Struct):
    shape: PackingShape
    budget: int  # tokens of a micro-batch, padding included
    ways: dict[str, Way]
    packed_over_sorted: float
    packed_over_unsorted: float


class TreeCase(Struct):
    """Tokens of branches a second, each branch whole, in either way; and the first way over the second."""

    shape: PackingShape
    tokens_per_second: dict[str, float]
    ratio: float


class PackingReport(Struct):
    reply_tokens: int  # of the longest reply
    samples_per_step: int
    real_tokens_per_step: float
    cases: list[PackingCase]
    trees: list[TreeCase] = []


def packing_config(folder: Path, shape: PackingShape, budget: int, settings: PackingSettings) -> Config:
    """`Shape.bench_config` with these lengths and this budget, and without a reference."""
    config = shape.bench_config(folder)
    return replace(
        config,
        data=replace(config.data, max_prompt_tokens=settings.prompt_tokens),
        sampling=replace(config.sampling, max_new_tokens=settings.reply_tokens),
        algorithm=replace(config.algorithm, kl_coefficient=0.0),
        training=replace(config.training, max_tokens_per_microbatch=budget),
    )


async def measure(folder: Path, settings: PackingSettings, show: Callable[[str], None] = lambda line: None) -> PackingReport:
    """Each case in a process of its own of one thread, its ways in turn. Raises UserError, ServiceFault."""
    cases, lengths = [], []
    for shape, budget in product(settings.shapes, settings.budgets):
        config = packing_config(folder, shape, budget, settings)
        lengths = draw_lengths(config)
        rounds: dict[str, list[Measured]] = {way: [] for way in WAYS}
        async with Worker.started(config, 1) as worker:
            for number in range(settings.rounds):
                for way in WAYS:
                    show(f"{shape.name}, {budget} tokens: round {number + 1} of {settings.rounds}, {way}")
                    rounds[way].append(await worker.measure(way, settings.seconds))
        cases.append(_case(shape, budget, lengths, {way: total(measured).rate for way, measured in rounds.items()}))
    trees = [await _trees(folder, shape, settings, show) for shape in settings.shapes]
    return PackingReport(
        reply_tokens=max(max(group.replies) for batch in lengths for group in batch),
        samples_per_step=sum(len(group.replies) for group in lengths[0]),
        real_tokens_per_step=sum(sum(group.samples) for batch in lengths for group in batch) / len(lengths),
        cases=cases,
        trees=trees,
    )


async def _trees(folder: Path, shape: PackingShape, settings: PackingSettings, show: Callable[[str], None]) -> TreeCase:
    """Both ways in turn, in micro-batches of the first budget."""
    rounds: dict[str, list[Measured]] = {TREES: [], APART: []}
    async with Worker.started(packing_config(folder, shape, settings.budgets[0], settings), 1) as worker:
        for number in range(settings.rounds):
            for way, measured in rounds.items():
                show(f"{shape.name}: round {number + 1} of {settings.rounds}, {way}")
                measured.append(await worker.measure(way, settings.seconds))
    rates = {way: total(measured).rate for way, measured in rounds.items()}
    return TreeCase(shape, rates, rates[TREES] / rates[APART])


def _case(shape: PackingShape, budget: int, lengths: Sequence[Sequence[GroupLengths]], rates: dict[str, float]) -> PackingCase:
    return PackingCase(
        shape=shape,
        budget=budget,
        ways={way: Way(rate, waste(way, lengths, budget)) for way, rate in rates.items()},
        packed_over_sorted=rates[PACKED] / rates[SORTED],
        packed_over_unsorted=rates[PACKED] / rates[UNSORTED],
    )


def waste(way: str, batches: Sequence[Sequence[GroupLengths]], budget: int) -> Waste:
    """What `way` computes for `batches` beyond their tokens, by the cuts that it makes."""
    real = linear = attention = needed = fed = 0
    for groups in batches:
        samples = [length for group in groups for length in group.samples]
        real += sum(samples)
        if way == PACKED:
            for lengths, shared, cells in _packed(groups, budget):
                linear, attention, needed = (
                    linear + int((lengths - shared).sum()),
                    attention + cells,
                    needed + int(lengths.sum()),
                )
            continue
        for rows in cut(way, samples, budget):
            fed += sum(samples[row] for row in rows)
            linear += len(rows) * max(samples[row] for row in rows)
    if way == PACKED:
        return Waste(linear=0.0, attention=1 - needed / attention, computed=linear / real)
    return Waste(linear=1 - fed / linear, attention=1 - fed / linear, computed=linear / real)


def _packed(groups: Sequence[GroupLengths], budget: int) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """Of each micro-batch the tokens of its rows, those that a row before has, too, and the cells of its attention rows."""
    import torch

    from runtime.trainer.micro_batch import attention_rows

    # The last token of a reply predicts nothing and is not fed; a prompt runs through the linear layers once.
    length = np.array([length - 1 for group in groups for length in group.samples])
    owner = np.repeat(np.arange(len(groups)), [len(group.replies) for group in groups])
    prompt = np.array([group.prompt for group in groups])[owner]
    first = np.diff(owner, prepend=-1) > 0
    for batch in cut_trees(length.tolist(), np.where(first, 0, prompt).tolist(), budget):
        rows = np.sort(batch)
        shared = np.where(np.diff(owner[rows], prepend=-1) > 0, 0, prompt[rows])
        sequences = np.stack([starts(length[rows]), shared, length[rows] - shared], 1)
        packing = attention_rows(tree_paths(length[rows], shared), sequences, torch.device("cpu"))
        yield length[rows], shared, sum(part.numel() for part in packing.rows)


def compared(report: PackingReport) -> list[Compared]:
    return [
        Compared("tokens/s, packed / sorted by length", [case.packed_over_sorted for case in report.cases]),
        Compared("tokens/s, trees of 8 branches that share 3/4 / apart", [case.ratio for case in report.trees], "≥ 2"),
    ]


def render(report: PackingReport) -> list[LiteralTable]:
    return [*(_render(report, case) for case in report.cases), *([_render_trees(report.trees)] if report.trees else [])]


def _render_trees(cases: Sequence[TreeCase]) -> LiteralTable:
    title = f"Training on trees of {BRANCHES} branches that share three quarters"
    table = LiteralTable(title=title, title_justify="left", title_style="bold")
    for name in ("", "trees, tokens/s", "branches apart", "ratio"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for case in cases:
        rates = (f"{case.tokens_per_second[way]:,.0f}" for way in (TREES, APART))
        table.add_row(case.shape.name, *rates, f"× {case.ratio:.2f}")
    return table


def _render(report: PackingReport, case: PackingCase) -> LiteralTable:
    title = f"Training, {case.shape.name}, micro-batches of {case.budget:,} tokens"
    table = LiteralTable(title=title, title_justify="left", title_style="bold")
    for name in ("", "tokens/s", "packed is", "padding", "in attention", "computed"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    ratios = {PACKED: "", SORTED: f"× {case.packed_over_sorted:.2f}", UNSORTED: f"× {case.packed_over_unsorted:.2f}"}
    for name, way in case.ways.items():
        table.add_row(
            name,
            f"{way.tokens_per_second:,.0f}",
            ratios[name],
            f"{way.waste.linear:.1%}",
            f"{way.waste.attention:.1%}",
            f"{way.waste.computed:.2f}",
        )
    table.caption = (
        f"float32, one thread; {report.samples_per_step} samples and {report.real_tokens_per_step:,.0f} real tokens a step, "
        f"replies of at most {report.reply_tokens}; tokens are real ones, computed is per real token"
    )
    table.caption_justify = "left"
    return table
