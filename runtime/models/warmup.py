"""Supervised warm-up: a tiny model that answers about half of the held-out problems, for reinforcement learning to improve.

The corpus is careless on purpose, as scraped text is: each time a sum with a carry is drawn, its answer forgets the carry
with probability `forgotten_carry`. The model learns both ways to work a sum and, greedy, follows the more common one, so
its accuracy settles near the share of sums without a carry. The problems written for what follows have right answers only.

`python -m runtime.models.warmup SETTINGS` takes the `warmup` section as JSON and prints one JSON object a line:
`{"event": "progress", "step", "loss", "accuracy", "target", "seconds"}`, at the end
`{"event": "done", "folder", "accuracy", "steps", "seconds"}`, or `{"event": "error", "message"}` and exit code 2.
torch is imported where it is used: the launcher calls `cache_folder` without it.
"""

from __future__ import annotations

import hashlib
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from runtime.config import Warmup
from runtime.data import arithmetic
from runtime.data.arithmetic import ArithmeticProblem
from runtime.errors import ConfigError, UserError
from runtime.models import tiny_model

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer
    from transformers import Qwen2ForCausalLM

    Rows = tuple[torch.Tensor, torch.Tensor]  # tokens int64 [N, T], padded right; mask of the reply's tokens bool [N, T]

RECIPE = 2  # part of the cache's key: raise it when this file changes what a setting produces
CHECK_EVERY = 10  # steps between two looks at the held-out accuracy
RAMP_STEPS = 20  # of the learning rate
AVERAGE_DECAY = 0.9  # of the running mean of the weights, which is what is measured and saved

# Training ends once this share of the held-out replies is what the corpus would say, carry forgotten or not. Accuracy alone
# would end it in the steep middle of learning, where a model that guesses digits scores as high as one that adds.
FLUENCY = 0.95

Progress = Callable[[dict[str, object]], None]


def cache_folder(settings: Warmup) -> Path:
    """Where the result for these settings lies, or would lie. It is complete once it exists."""
    key = {k: v for k, v in msgspec.to_builtins(settings).items() if k not in ("cache", "max_seconds")}
    digest = hashlib.sha256(json.dumps([RECIPE, key], sort_keys=True).encode()).hexdigest()
    return Path(settings.cache) / f"warmup-{digest[:16]}"


def warm_up(settings: Warmup, folder: Path, progress: Progress = lambda line: None) -> None:
    """Write `folder`: model/ (a Hugging Face folder), train.jsonl, eval.jsonl and warmup.json (accuracy, steps, seconds).

    The folder appears whole or not at all; when another process was first, its folder stays. Raises UserError when the
    model is not fluent, with an accuracy between `accuracy` and `max_accuracy`, within `max_seconds`.
    """
    train, held_out = arithmetic.split(settings.min_operand, settings.max_operand, settings.eval_problems, settings.seed)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        whole = Path(scratch) / "whole"
        (whole / "model").mkdir(parents=True)
        tokenizer = tiny_model.write_tokenizer(whole / "model")
        model = tiny_model.make_model(settings, tokenizer)
        corpus = Corpus(tokenizer, train, settings.forgotten_carry, settings.seed)
        result = _fit(model, corpus, Examination(tokenizer, held_out), settings, progress)
        model.save_pretrained(whole / "model")
        arithmetic.write_jsonl(whole / "train.jsonl", train)
        arithmetic.write_jsonl(whole / "eval.jsonl", held_out)
        (whole / "warmup.json").write_text(json.dumps(result) + "\n", encoding="utf-8")
        try:
            whole.rename(folder)
        except OSError:  # a folder that is not empty is never replaced
            if not (folder / "warmup.json").exists():
                raise
    progress({"event": "done", "folder": str(folder), **result})


class Corpus:
    """The training problems, each draw of which may forget the carry."""

    def __init__(self, tokenizer: Tokenizer, problems: Sequence[ArithmeticProblem], forgotten_carry: float, seed: int):
        import torch

        self._careful = _rows(tokenizer, [(p.question, p.answer) for p in problems])
        # Forgetting a carry never makes a reply longer, so the careful rows' width holds both.
        self._careless = _rows(tokenizer, [(p.question, p.careless_answer) for p in problems], self._careful[0].shape[1])
        self._forgotten_carry = forgotten_carry
        self._random = torch.Generator().manual_seed(seed)

    def draw(self, count: int) -> Rows:
        """`count` rows, drawn with replacement."""
        import torch

        chosen = torch.randint(len(self._careful[0]), (count,), generator=self._random)
        forgets = (torch.rand(count, generator=self._random) < self._forgotten_carry)[:, None]
        tokens, mask = (
            torch.where(forgets, careless[chosen], careful[chosen])
            for careless, careful in zip(self._careless, self._careful, strict=True)
        )
        return tokens, mask


class Examination:
    """What a model says, greedy, to the held-out problems."""

    def __init__(self, tokenizer: Tokenizer, held_out: Sequence[ArithmeticProblem]):
        carries = [p for p in held_out if p.carry]
        self._right = _rows(tokenizer, [(p.question, p.answer) for p in held_out])
        self._slips = _rows(tokenizer, [(p.question, p.careless_answer) for p in carries])
        self._slips_share = len(carries) / max(1, len(held_out))

    def accuracy(self, model: torch.nn.Module) -> float:
        """The share of right replies."""
        return greedy_accuracy(model, self._right)

    def careless(self, model: torch.nn.Module) -> float:
        """The share of replies that are wrong by the forgotten carry alone."""
        return greedy_accuracy(model, self._slips) * self._slips_share if self._slips_share else 0.0


def _fit(
    model: Qwen2ForCausalLM, corpus: Corpus, examination: Examination, settings: Warmup, progress: Progress
) -> dict[str, float]:
    """Train until the mean of the weights is fluent and as accurate as wanted, and leave that mean in `model`."""
    import torch
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(AVERAGE_DECAY))
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    ramp = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min(1.0, (done + 1) / RAMP_STEPS))
    started = time.monotonic()
    step, accuracy, seconds = 0, 0.0, 0.0
    while seconds < settings.max_seconds:
        step += 1
        loss = _supervised_step(model, optimizer, corpus.draw(settings.batch_size))
        ramp.step()
        average.update_parameters(model)
        seconds = time.monotonic() - started
        if step % CHECK_EVERY:
            continue
        accuracy = examination.accuracy(average.module)
        progress(_progress_line(step, loss, accuracy, settings.accuracy, seconds))
        within = settings.accuracy <= accuracy <= settings.max_accuracy
        if within and accuracy + examination.careless(average.module) >= FLUENCY:
            model.load_state_dict(average.module.state_dict())
            return {"accuracy": accuracy, "steps": step, "seconds": round(seconds, 2)}
    raise UserError(
        f"warmup.max_seconds: {settings.max_seconds:g} s were not enough: held-out accuracy {accuracy:.2f} after {step} steps, "
        f"wanted {settings.accuracy:g} to {settings.max_accuracy:g}"
    )


def _supervised_step(model: Qwen2ForCausalLM, optimizer: torch.optim.Optimizer, rows: Rows) -> float:
    """One update on the cross-entropy of the replies' tokens, which is returned (in nats a token)."""
    import torch

    tokens, mask = rows
    logits = model(input_ids=tokens).logits[:, :-1][mask[:, 1:]]
    loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:][mask[:, 1:]])
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def greedy_accuracy(model: torch.nn.Module, rows: Rows) -> float:
    """The share of rows whose reply greedy decoding reproduces exactly.

    One forward pass decides it: decoding reproduces a reply if and only if each of its tokens is the most likely one after
    the tokens before it.
    """
    import torch

    tokens, mask = rows
    with torch.no_grad():
        best = model(input_ids=tokens).logits[:, :-1].argmax(-1)
    return ((best == tokens[:, 1:]) | ~mask[:, 1:]).all(dim=1).float().mean().item()


def _rows(tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]], width: int = 0) -> Rows:
    """Questions and replies as the chat template renders them, padded right to the longest or to `width`."""
    import torch

    pad = tokenizer.token_to_id(tiny_model.END_OF_TEXT)
    prompts = tokenizer.encode_batch([f"<|user|>{question}<|im_end|><|assistant|>" for question, _ in pairs])
    replies = tokenizer.encode_batch([f"{answer}<|im_end|>" for _, answer in pairs])
    width = max(width, *(len(p.ids) + len(r.ids) for p, r in zip(prompts, replies, strict=True)))
    tokens = torch.full((len(pairs), width), pad)
    mask = torch.zeros(len(pairs), width, dtype=torch.bool)
    for row, (prompt, reply) in enumerate(zip(prompts, replies, strict=True)):
        start, end = len(prompt.ids), len(prompt.ids) + len(reply.ids)
        tokens[row, :end] = torch.tensor(prompt.ids + reply.ids)
        mask[row, start:end] = True
    return tokens, mask


def _progress_line(step: int, loss: float, accuracy: float, target: float, seconds: float) -> dict[str, object]:
    return {
        "event": "progress",
        "step": step,
        "loss": round(loss, 4),
        "accuracy": round(accuracy, 4),
        "target": target,
        "seconds": round(seconds, 2),
    }


def main(arguments: Sequence[str]) -> int:
    """Run the warm-up for the settings in `arguments`; 0 when the cache folder is complete, 2 on a user's mistake."""

    def emit(line: dict[str, object]) -> None:
        print(json.dumps(line), flush=True)

    try:
        if len(arguments) != 1:
            raise UserError("usage: python -m runtime.models.warmup SETTINGS (the warmup section as JSON)")
        settings = _decode(arguments[0])
        folder = cache_folder(settings)
        if folder.exists():
            result = json.loads((folder / "warmup.json").read_text(encoding="utf-8"))
            emit({"event": "done", "folder": str(folder), **result})
            return 0
        import torch

        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the scratch folder goes too
        torch.set_num_threads(1)  # so small a model gains little from two, and loses all of it on busy cores
        warm_up(settings, folder, emit)
    except UserError as error:
        emit({"event": "error", "message": str(error)})
        return 2
    return 0


def _decode(text: str) -> Warmup:
    try:
        return msgspec.json.decode(text, type=Warmup)
    except msgspec.DecodeError as error:
        raise ConfigError([f"warmup: {error}"]) from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
