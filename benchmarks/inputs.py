"""What the benches run on: a tiny model with random weights, and sums as prompts."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from msgspec.structs import replace

from launcher.commands import quickstart
from runtime.config import Config, loading
from runtime.data import arithmetic
from runtime.models.tiny_model import Shape

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "bench.yaml"

# A random model gives each of its 264 tokens nearly the same probability. With this many of them ending a reply, lengths are
# geometric, 15 tokens on average when cut at 64; no weight has to be shaped, so that training leaves them as they are.
END_TOKENS = 19
CONTEXT_TOKENS = 1024
QUICKSTART = Shape()
SEED = 7


def bench_config(folder: Path, shape: Shape = QUICKSTART, vocabulary: int = 0) -> Config:
    """The bench's configuration, resolved, with its model and prompts made under `folder` unless they lie there.

    `vocabulary`: see `make_model`.
    """
    if not (folder / "model" / "config.json").exists():
        _make(folder, shape, vocabulary)
    config = loading.load(CONFIG, ())
    return loading.resolve(
        replace(
            config,
            model=replace(config.model, path=str(folder / "model")),
            data=replace(config.data, train=str(folder / "train.jsonl")),
        )
    )


def pretrained_config() -> Config:
    """The configuration of `sluice quickstart --pretrained`, resolved, with its model and problems made unless they are there.

    Groups without signal count too, as they do for the loops that a run is compared with; nothing is evaluated.
    Raises UserError where the model's package cannot be had.
    """
    overrides = ("algorithm.dynamic_sampling=false", "evaluation.before=false", "evaluation.after=false")
    config = loading.resolve(loading.load(quickstart.PRETRAINED, overrides))
    quickstart.prepare(config, lambda line: None)
    return config


def answer_pattern(config: Config) -> str:
    """The regular expression whose first group is what a reply answers, for the loops that do without Sluice's rules."""
    return r"#### (-?\d+)\s*$" if config.rewards.rules[0].name == "gsm8k" else r"(-?\d+)(?!.*\d)"


def _make(folder: Path, shape: Shape, vocabulary: int) -> None:
    """Everything, or nothing when another process was first."""
    from runtime.models import tiny_model

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        whole = Path(scratch) / "whole"
        (whole / "model").mkdir(parents=True)
        tokenizer = tiny_model.write_tokenizer(whole / "model")
        model = tiny_model.make_model(shape, tokenizer, vocabulary, SEED)
        model.config.max_position_embeddings = CONTEXT_TOKENS
        end = tokenizer.token_to_id(tiny_model.END_OF_TURN)
        model.save_pretrained(whole / "model")
        _end_replies_with(whole / "model", [*range(END_TOKENS - 1), end])
        problems, _ = arithmetic.split(10, 49, 256, SEED)
        arithmetic.write_jsonl(whole / "train.jsonl", problems)
        try:
            whole.rename(folder)  # a folder that is not empty is never replaced
        except OSError:
            if not (folder / "model" / "config.json").exists():
                raise


def _end_replies_with(model: Path, ids: list[int]) -> None:
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((model / name).read_text(encoding="utf-8"))
        (model / name).write_text(json.dumps({**settings, "eos_token_id": ids}, indent=2) + "\n", encoding="utf-8")
