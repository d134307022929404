"""Supervised warm-up: a tiny model that answers about half of the held-out problems, for reinforcement learning to improve.

The corpus is careless on purpose, as scraped text is. With probability `careless`, a drawn sum with a carry forgets the
carry, and a key that ends in a digit is answered with that digit instead of being looked up. The model learns both ways, and
its accuracy settles near the share of problems that are always right. Reinforcement learning has only right answers.

`python -m runtime.sft.warmup SETTINGS` takes the `warmup` section as JSON and prints one JSON object a line:
`{"event": "progress", "step", "loss", "accuracy", "target", "seconds"}`, at the end
`{"event": "done", "folder", "accuracy", "steps", "seconds"}`, or `{"event": "error", "message"}` and exit code 2.
torch is imported where it is used: the launcher calls `cache_folder` without it.
"""

from __future__ import annotations

import hashlib
import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from runtime.config import Config, Model, Optimizer, Run, Training, Warmup
from runtime.data import arithmetic
from runtime.data.arithmetic import TOOL, lookups
from runtime.data.templates import ChatTemplate
from runtime.errors import ConfigError, UserError
from runtime.models import tiny_model
from runtime.sft.conversations import SftRow, taught_rows

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer
    from transformers import Qwen2ForCausalLM

    from runtime.trainer.step import ModelTrainer
    from runtime.types import TrainGroup

VERSION = 5  # part of the cache's key: raise it when this file changes what a setting produces
CHECK_EVERY = 10  # steps between two measurements of the held-out accuracy
RAMP_STEPS = 20  # of the learning rate
LARGEST = 1 << 16  # tokens of a micro-batch: a step is one micro-batch
AVERAGE_DECAY = 0.9  # of the running mean of the weights, which is measured and saved

# Training ends only if this share of the held-out replies is as in the corpus, carry forgotten or not. Accuracy alone would end
# it in the steep middle of learning: there, guessing digits scores as high as adding.
FLUENCY = 0.95

# The same for sampled replies, for lookups: greedily, copied letters are right long before the model is sure of them.
SAMPLED_FLUENCY = 0.9


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """How a model is made for a task, besides what the section `warmup` says."""

    shape: tiny_model.Shape
    operands: tuple[int, int] = (10, 49)  # the sums are all those of two numbers of this range
    careless: float = 0.7  # the probability of a careless answer: what is left for reinforcement learning to mend
    margin: float = 0.16  # a model whose accuracy exceeds the one wanted by more has learned too much
    learning_rate: float = 2e-3
    batch_size: int = 64


RECIPES = {
    "sums": Recipe(shape=tiny_model.WARMED_UP["sums"]),
    "lookup": Recipe(shape=tiny_model.WARMED_UP["lookup"], learning_rate=3e-3, batch_size=32),
}

Progress = Callable[[dict[str, object]], None]
Conversation = Sequence[dict[str, Any]]
TaughtProblem = arithmetic.ArithmeticProblem | arithmetic.LookupProblem


class TaughtRows(NamedTuple):
    """Conversations as the chat template renders them."""

    tokens: torch.Tensor  # int64 [N, T], padded right
    mask: torch.Tensor  # bool [N, T]: the tokens that the assistant writes
    shared: int  # tokens that all rows begin with: the tools


def _task(settings: Warmup, recipe: Recipe) -> tuple[Sequence[TaughtProblem], Sequence[TaughtProblem], list[dict[str, Any]]]:
    """Return problems to train on, held-out problems, and the tools that the assistant may call."""
    if settings.task == "lookup":
        return *lookups(settings.eval_problems, settings.seed), [TOOL]
    return *arithmetic.split(*recipe.operands, settings.eval_problems, settings.seed), []


def cache_folder(settings: Warmup) -> Path:
    """Return the folder of the result for these settings. The folder is complete if it exists."""
    key = {k: v for k, v in msgspec.to_builtins(settings).items() if k not in ("cache", "max_seconds")}
    recipe = msgspec.to_builtins(RECIPES[settings.task])
    digest = hashlib.sha256(json.dumps([VERSION, key, recipe], sort_keys=True).encode()).hexdigest()
    return Path(settings.cache) / f"warmup-{digest[:16]}"


def warm_up(settings: Warmup, folder: Path, progress: Progress = lambda line: None, recipe: Recipe | None = None) -> None:
    """Write `folder`: model/ (a Hugging Face folder), train.jsonl, eval.jsonl and warmup.json (accuracy, steps, seconds). The
    folder appears whole or not at all; if another process was first, its folder stays. Raises UserError if the model is not
    fluent, with an accuracy between `accuracy` and `margin` above it, within `max_seconds`."""
    recipe = recipe or RECIPES[settings.task]
    train, held_out, tools = _task(settings, recipe)
    with tiny_model.appearing(folder) as whole:
        (whole / "model").mkdir()
        tokenizer = tiny_model.write_tokenizer(whole / "model")
        model = tiny_model.make_model(recipe.shape, tokenizer, seed=settings.seed)
        model.save_pretrained(whole / "model")
        corpus = Corpus(tokenizer, train, tools, recipe.careless, settings.seed)
        examination = Examination(tokenizer, held_out, tools, sampled=settings.task == "lookup")
        result = _fit(model, whole / "model", corpus, examination, settings, recipe, progress)
        model.save_pretrained(whole / "model")
        arithmetic.write_jsonl(whole / "train.jsonl", train)
        arithmetic.write_jsonl(whole / "eval.jsonl", held_out)
        (whole / "warmup.json").write_text(json.dumps(result) + "\n", encoding="utf-8")
    progress({"event": "done", "folder": str(folder), **result})


class Corpus:
    """The training problems. Each drawn answer may be careless."""

    def __init__(
        self, tokenizer: Tokenizer, problems: Sequence[TaughtProblem], tools: list[dict[str, Any]], careless: float, seed: int
    ):
        """Encode the problems. `careless`: the probability of a careless answer."""
        import torch

        self._careful, self._shared = _taught(tokenizer, [p.conversation() for p in problems], tools)
        self._careless, _ = _taught(tokenizer, [p.conversation(careless=True) for p in problems], tools)
        self._share = careless
        self._random = torch.Generator().manual_seed(seed)

    def draw(self, count: int) -> TrainGroup:
        """Return `count` rows, drawn with replacement."""
        import torch

        from runtime.sft.rank import taught_group

        chosen = torch.randint(len(self._careful), (count,), generator=self._random).tolist()
        slips = (torch.rand(count, generator=self._random) < self._share).tolist()
        rows = [(self._careless if slip else self._careful)[at] for at, slip in zip(chosen, slips, strict=True)]
        return taught_group(0, rows, self._shared)


class Examination:
    """Measurement of a model's replies to the held-out problems."""

    def __init__(
        self, tokenizer: Tokenizer, held_out: Sequence[TaughtProblem], tools: list[dict[str, Any]], sampled: bool = False
    ):
        """Encode the held-out problems. `sampled`: measure fluency on replies at temperature 1, otherwise on greedy ones."""
        slips = [wrong for p in held_out if (wrong := p.conversation(careless=True)) != p.conversation()]
        self.right = _rows(tokenizer, [p.conversation() for p in held_out], tools)
        self._slips = _rows(tokenizer, slips, tools) if slips else None
        self._slips_share = len(slips) / len(held_out)
        self._sampled = sampled

    def is_fluent(self, model: torch.nn.Module) -> bool:
        """Return whether most replies are right, or wrong only by carelessness."""
        share = sampled_accuracy if self._sampled else greedy_accuracy
        careless = share(model, self._slips) * self._slips_share if self._slips is not None else 0.0
        return share(model, self.right) + careless >= (SAMPLED_FLUENCY if self._sampled else FLUENCY)


def _fit(
    average: Qwen2ForCausalLM,
    folder: Path,
    corpus: Corpus,
    examination: Examination,
    settings: Warmup,
    recipe: Recipe,
    progress: Progress,
) -> dict[str, float]:
    """Train the model of `folder` until the running mean of its weights, `average`, is fluent and has the wanted accuracy."""
    from runtime.sft.rank import supervised_trainer

    options = Optimizer(learning_rate=recipe.learning_rate, warmup_steps=RAMP_STEPS, betas=(0.9, 0.95))
    training = Training(optimizer=options, max_tokens_per_microbatch=LARGEST)
    run = Run(name="warm-up", dir=str(folder.parent))
    trainer = supervised_trainer(Config(run=run, model=Model(path=str(folder), dtype="float32"), training=training))
    started = time.monotonic()
    step, accuracy, seconds, most = 0, 0.0, 0.0, min(1.0, settings.accuracy + recipe.margin)
    while seconds < settings.max_seconds:
        step += 1
        trainer.begin_step(step - 1)
        trainer.accumulate([corpus.draw(recipe.batch_size)], last=True)
        loss = trainer.apply().metrics["sft/loss"]
        _follow(average, trainer, AVERAGE_DECAY if step > 1 else 0.0)
        seconds = time.monotonic() - started
        if step % CHECK_EVERY:
            continue
        accuracy = greedy_accuracy(average, examination.right)
        shown = {"loss": round(loss, 4), "accuracy": round(accuracy, 4), "seconds": round(seconds, 2)}
        progress({"event": "progress", "step": step, "target": settings.accuracy, **shown})
        if settings.accuracy <= accuracy <= most and examination.is_fluent(average):
            return {"accuracy": accuracy, "steps": step, "seconds": round(seconds, 2)}
    raise UserError(
        f"warmup.max_seconds: {settings.max_seconds:g} s were not enough: held-out accuracy {accuracy:.2f} after {step} steps, "
        f"wanted {settings.accuracy:g} to {most:g}, and most other replies wrong by carelessness alone"
    )


def _follow(average: Qwen2ForCausalLM, trainer: ModelTrainer, decay: float) -> None:
    """Update the running mean of the weights: `decay` · the mean before + (1 − `decay`) · the weights."""
    means, specs = dict(average.named_parameters()), trainer.backend.tensor_specs()
    for shard in trainer.backend.shards():  # one process holds every tensor whole
        means[specs[shard.tensor].name].data.lerp_(shard.block, 1 - decay)


def greedy_accuracy(model: torch.nn.Module, rows: TaughtRows) -> float:
    """Return the share of rows in which greedy decoding reproduces exactly the assistant's tokens. One forward pass is enough:
    decoding reproduces a reply if and only if each of its tokens is the most likely one after the tokens before it."""
    import torch

    with torch.no_grad():
        logits, targets, mask = _predicted(model, rows)
    return ((logits.argmax(-1) == targets) | ~mask).all(dim=1).float().mean().item()


def sampled_accuracy(model: torch.nn.Module, rows: TaughtRows) -> float:
    """Return the share of rows in which sampling at temperature 1 gives the assistant's tokens: their mean probability."""
    import torch

    with torch.no_grad():
        logits, targets, mask = _predicted(model, rows)
        logprobs = torch.log_softmax(logits, -1).gather(-1, targets[..., None]).squeeze(-1)
    return torch.where(mask, logprobs, 0.0).sum(1).exp().mean().item()


def _predicted(model: torch.nn.Module, rows: TaughtRows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return logits [N, S, V] of the tokens after the shared ones (computed once) and the first one, the tokens, their mask."""
    tokens, mask, shared = rows
    cache = None
    if shared:
        cache = model(input_ids=tokens[:1, :shared], use_cache=True).past_key_values
        cache.batch_repeat_interleave(len(tokens))
    logits = model(input_ids=tokens[:, shared:], past_key_values=cache).logits[:, :-1]
    return logits, tokens[:, shared + 1 :], mask[:, shared + 1 :]


def _taught(
    tokenizer: Tokenizer, conversations: Sequence[Conversation], tools: list[dict[str, Any]]
) -> tuple[list[SftRow], int]:
    """Return a row of each conversation, and the number of tokens that all rows begin with: the tools."""

    def encode(texts: list[str]) -> list[list[int]]:
        return [each.ids for each in tokenizer.encode_batch(texts)]

    template = ChatTemplate(tiny_model.CHAT_TEMPLATE, {}, "the tiny model")
    rows = taught_rows(template, encode, conversations, [tokenizer.token_to_id(tiny_model.END_OF_TURN)], tools)
    return list(chain.from_iterable(rows)), len(encode([template.render([], False, tools)])[0])


def _rows(tokenizer: Tokenizer, conversations: Sequence[Conversation], tools: list[dict[str, Any]]) -> TaughtRows:
    """Return the conversations, at least one, as rows that are padded to the longest."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    rows, shared = _taught(tokenizer, conversations, tools)
    padding = tokenizer.token_to_id(tiny_model.END_OF_TEXT)
    tokens = pad_sequence([torch.from_numpy(row.tokens).long() for row in rows], True, padding)
    return TaughtRows(tokens, pad_sequence([torch.from_numpy(row.mask) for row in rows], True), shared)


def main(given: str) -> int:
    """Run the warm-up for the settings `given`. Return 0 if the cache folder is complete, 2 on a user's mistake."""

    def emit(line: dict[str, object]) -> None:
        print(json.dumps(line), flush=True)

    try:
        try:
            settings = msgspec.json.decode(given, type=Warmup)
        except msgspec.DecodeError as error:
            raise ConfigError([f"warmup: {error}"]) from None
        folder = cache_folder(settings)
        if folder.exists():
            result = json.loads((folder / "warmup.json").read_text(encoding="utf-8"))
            emit({"event": "done", "folder": str(folder), **result})
            return 0
        import torch

        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the scratch folder is removed
        torch.set_num_threads(1)  # a small model gains little from two threads, and nothing on busy cores
        warm_up(settings, folder, emit)
    except UserError as error:
        emit({"event": "error", "message": str(error)})
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
