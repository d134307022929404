"""Conversations to tune a tiny model on, and what became of it, for the tests of supervised fine-tuning."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from runtime.config import Checkpoint, Config, Data, Model, Optimizer, Run, Services, Sft, Tracker, Trainer, Training
from runtime.models import tiny_model
from runtime.sft.conversations import SftRow
from runtime.sft.rank import SftRank
from tests.unit.test_warmup import SHAPE

SUMS = [(a, b) for a in range(6) for b in range(6)]


def make_sums(folder: Path) -> Path:
    """A tiny random model, `model`, and `sums.jsonl`: questions and answers."""
    (folder / "model").mkdir(parents=True)
    tokenizer = tiny_model.write_tokenizer(folder / "model")
    tiny_model.make_model(SHAPE, tokenizer).save_pretrained(folder / "model")
    rows = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a, b in SUMS]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def make_sft(folder: Path, name: str = "run", processes: int = 1, every: int = 0, **changes: Any) -> Config:
    """Of the folder of `make_sums`; `changes` are keys of the section."""
    optimizer = Optimizer(**{"warmup_steps": 2, **changes.pop("optimizer", {})})
    chosen: dict[str, Any] = {"epochs": 2, "batch_size": 8, "max_tokens": 64, "learning_rate": 5e-3, **changes}
    return Config(
        run=Run(name=name, dir=str(folder / name)),
        model=Model(path=str(folder / "model")),
        data=Data(train=str(folder / "sums.jsonl")),
        training=Training(optimizer=optimizer),
        sft=Sft(**chosen),
        services=Services(trainer=Trainer(processes=processes)),
        checkpoint=Checkpoint(every=every, keep=9),
        trackers=[Tracker(name="jsonl")],
    )


def tuned(config: Config, rank: int = 0, world_size: int = 1, after: Callable[[SftRank], None] = lambda _: None) -> SftRank:
    """A rank that ran to its end. `after`: called as each step begins."""
    made = SftRank(config, rank, world_size, torch.device("cpu"))
    step = made._step

    def counted() -> Any:
        after(made)
        return step()

    made._step = counted  # type: ignore[method-assign]
    asyncio.run(made.run())
    return made


def points(config: Config) -> list[dict[str, Any]]:
    lines = (Path(config.run.dir) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def cross_entropy(model: Any, rows: Sequence[SftRow]) -> torch.Tensor:
    """Of the taught tokens, their mean, each row by itself."""
    losses = []
    for row in rows:
        ids = torch.from_numpy(row.tokens).long()
        logp = torch.log_softmax(model(ids[None]).logits[0, :-1], -1)
        losses += [-logp[at - 1, ids[at]] for at in range(1, len(ids)) if row.mask[at]]
    return torch.stack(losses).sum() / len(losses)


def resumed(config: Config, step: int) -> Config:
    folder = Path(config.run.dir) / "checkpoints" / f"step-{step:08d}"
    return replace(config, run=replace(config.run, resume=str(folder)))


def greedy_accuracy(folder: Path) -> float:
    """Of the sums that the model in `folder` answers rightly, with the token that ends a reply."""
    from transformers import AutoModelForCausalLM

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), tiny_model.make_tokenizer()
    right = 0
    for a, b in SUMS:
        prompt = torch.tensor([tokenizer.encode(f"<|user|>{a}+{b}=<|im_end|><|assistant|>").ids])
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=False)
        right += tokenizer.decode(out[0, prompt.shape[1] :].tolist(), skip_special_tokens=False) == f"{a + b}<|im_end|>"
    return right / len(SUMS)
