"""`python -m benchmarks.replay [--seeds N]`: what `moe.router_replay` is worth where rollout and trainer choose other experts.

The model is a tiny Qwen3-MoE with an unstable router: a token takes two of four experts, and the rows of a router differ by a
five-hundredth, so that the rounding of bfloat16 decides which. It is taught the sums of the quickstart's warm-up, carries
forgotten, with its routers as they are. Then it is trained as the quickstart is, with η = 4 and the clip about the policy that
sampled, with replay and without, in turn; a pair has a seed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from msgspec import Struct
from rich.console import Console
from safetensors.numpy import save_file

from benchmarks.staleness.runs import train_quickstart
from runtime import run_files
from runtime.config import Config, Model, Optimizer, Run, Training, Warmup
from runtime.data import arithmetic
from runtime.errors import SluiceError
from runtime.models import tiny_model
from runtime.models.families import family_for
from runtime.sft import warmup
from runtime.telemetry.record import read_jsonl
from runtime.telemetry.shown import LiteralTable

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
SHAPE = {"num_attention_heads": 4, "num_key_value_heads": 2}
ROUTER = "mlp.gate.weight"
LARGE, APART = 20.0, 0.002  # each row of a router: LARGE · (one and the same row + APART · a row of its own)
TAUGHT = Warmup()  # seed, problems and accuracy
TEACHING_RATE, BATCH, MOST_STEPS = 3e-3, 64, 600
REPLAYS = ("routing", "off")
GOAL = 0.9


class ReplaySettings(Struct, frozen=True):
    steps: int = 300
    seeds: int = 5
    staleness: int = 4
    rate: float = 6e-4  # six times the quickstart's
    dtype: str = "bfloat16"
    loss: str = "ppo"
    deadline: float = 900.0  # seconds of one run


class ReplayTrial(Struct, frozen=True):
    """One run: its accuracy, and means over its steps."""

    seed: int
    replay: str
    accuracy: float  # of the held-out problems, after the last step
    metrics: dict[str, float]


MEANS = {
    "score, last 10": "score/mean",
    "mean |Δ|": "mismatch/abs_logprob",
    "over 0.1": "mismatch/over_0.1",
    "grad norm": "actor/grad_norm",
    "largest": "actor/grad_norm",
    "clipped": "actor/pg_clipfrac",
    "routing differs": "moe/routing_differs",
    "staleness": "staleness/mean",
    "s a step": "timing/all",
}


def taught(folder: Path) -> None:
    """Write `folder`: model/, train.jsonl and eval.jsonl. Raises SluiceError if the model does not learn."""
    described = tiny_model.described("tiny:qwen3_moe")
    assert described is not None
    described |= EXPERTS | SHAPE
    train, held_out = arithmetic.split(10, 49, TAUGHT.eval_problems, TAUGHT.seed)
    with tiny_model.appearing(folder) as whole:
        model = whole / "model"
        model.mkdir()
        family = family_for(described, mapped=False)
        weights = {name: _near(name, each) for name, each in tiny_model._weights(family)}
        (model / "config.json").write_text(json.dumps(described), encoding="utf-8")
        save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
        tokenizer = tiny_model.write_tokenizer(model)
        corpus = warmup.Corpus(tokenizer, train, [], warmup.RECIPES["sums"].careless, TAUGHT.seed)
        _teach(model, corpus, warmup.Examination(tokenizer, held_out, []))
        arithmetic.write_jsonl(whole / "train.jsonl", train)
        arithmetic.write_jsonl(whole / "eval.jsonl", held_out)


def _near(name: str, weight: np.ndarray) -> np.ndarray:
    if not name.endswith(ROUTER):
        return weight
    return np.float32(LARGE) * (weight[:1] + np.float32(APART) * weight)


def _teach(folder: Path, corpus: warmup.Corpus, examination: warmup.Examination) -> None:
    """Train the model of `folder`, but not its routers, as the warm-up does, and write the mean of its weights there."""
    from transformers import AutoModelForCausalLM

    from runtime.sft.rank import supervised_trainer

    average: Any = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32)
    optimizer = Optimizer(learning_rate=TEACHING_RATE, warmup_steps=warmup.RAMP_STEPS, betas=(0.9, 0.95))
    training = Training(optimizer=optimizer, max_tokens_per_microbatch=warmup.LARGEST)
    run = Run(name="taught", dir=str(folder.parent))
    trainer = supervised_trainer(Config(run=run, model=Model(path=str(folder), dtype="float32"), training=training))
    model: Any = trainer.backend
    routers = [p for name, p in model.model.named_parameters() if name.endswith(ROUTER)]
    kept = [each.detach().clone() for each in routers]
    for step in range(1, MOST_STEPS + 1):
        trainer.begin_step(step - 1)
        trainer.accumulate([corpus.draw(BATCH)], last=True)
        trainer.apply()
        with torch.no_grad():
            for router, before in zip(routers, kept, strict=True):
                router.copy_(before)
        warmup._follow(average, trainer, warmup.AVERAGE_DECAY if step > 1 else 0.0)
        if step % warmup.CHECK_EVERY == 0 and examination.is_fluent(average):
            low, accuracy = TAUGHT.accuracy, warmup.greedy_accuracy(average, examination.right)
            if low <= accuracy <= low + warmup.RECIPES["sums"].margin:
                average.save_pretrained(folder)
                return
    raise SluiceError(f"bench replay: the model did not learn within {MOST_STEPS} steps")


async def measure(folder: Path, settings: ReplaySettings) -> list[ReplayTrial]:
    """Make the runs that are not there yet, a pair for each seed."""
    start, found = folder / "start", list[ReplayTrial]()
    if not start.exists():
        print("teaching", flush=True)
        taught(start)
    for seed in range(1, settings.seeds + 1):
        for replay in REPLAYS if seed % 2 else REPLAYS[::-1]:
            name = f"seed{seed}-{replay}"
            rows = _rows(folder / name)
            if not rows or rows[-1]["step"] != settings.steps or "eval/accuracy" not in rows[-1]:
                await train_quickstart(name, _changes(folder, name, seed, replay, settings), folder, settings.deadline)
                rows = _rows(folder / name)
            found.append(_trial(seed, replay, rows))
            print(name, f"{found[-1].accuracy:.1%}", flush=True)
    return found


def _rows(folder: Path) -> list[dict[str, Any]]:
    path = folder / run_files.METRICS
    return read_jsonl(path) if path.exists() else []


def _trial(seed: int, replay: str, rows: list[dict[str, Any]]) -> ReplayTrial:
    values = {shown: [row[key] for row in rows if key in row] for shown, key in MEANS.items()}
    metrics = {shown: fmean(each[-10:] if "last" in shown else each) for shown, each in values.items() if each}
    metrics["largest"] = max(values["largest"])
    return ReplayTrial(seed, replay, rows[-1]["eval/accuracy"], metrics)


def _changes(folder: Path, name: str, seed: int, replay: str, settings: ReplaySettings) -> list[str]:
    start = folder / "start"
    return [
        f"run.name={name}",
        f"run.dir={json.dumps(str(folder / name))}",
        f"run.seed={seed}",
        "run.overwrite=true",
        f"warmup.cache={json.dumps(str(folder))}",
        f"model.path={json.dumps(str(start / 'model'))}",
        f"model.dtype={settings.dtype}",
        f"data.train={json.dumps(str(start / 'train.jsonl'))}",
        f"data.eval={json.dumps(str(start / 'eval.jsonl'))}",
        f"moe.router_replay={replay}",
        f"algorithm.loss={settings.loss}",
        "algorithm.kl_coefficient=0",
        f"training.optimizer.learning_rate={settings.rate:g}",
        f"training.staleness={settings.staleness}",
        "training.depth=bound",
        f"training.steps={settings.steps}",
        "evaluation.problems=0",
        "evaluation.every=0",
        "evaluation.before=false",
        "evaluation.after=true",
        "checkpoint.every=0",
        "services.rollout.replicas=1",
        "trackers=[{name: jsonl}]",
    ]


def render(trials: list[ReplayTrial]) -> LiteralTable:
    table = LiteralTable("seed", "replay", "accuracy", *MEANS)
    for trial in trials:
        shown = [f"{trial.metrics[name]:.3g}" if name in trial.metrics else "" for name in MEANS]
        table.add_row(str(trial.seed), trial.replay, f"{trial.accuracy:.1%}", *shown)
    ends = {replay: {one.seed: one.accuracy for one in trials if one.replay == replay} for replay in REPLAYS}
    better = sum(each > ends["off"][seed] for seed, each in ends["routing"].items())
    reached = {replay: sum(each >= GOAL for each in end.values()) for replay, end in ends.items()}
    table.caption = (
        f"with replay more accurate at the end in {better} of {len(ends['off'])} seeds; {GOAL:.0%} at the end in "
        f"{reached['routing']} with and {reached['off']} without"
    )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=ReplaySettings().seeds)
    parser.add_argument("--steps", type=int, default=ReplaySettings().steps)
    parser.add_argument("--folder", type=Path, default=Path("runs/.cache/bench/replay"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    trials = asyncio.run(measure(given.folder.resolve(), ReplaySettings(steps=given.steps, seeds=given.seeds)))
    Console(width=180).print(render(trials))


if __name__ == "__main__":
    main()
