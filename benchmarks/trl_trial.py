"""Steps of TRL's GRPOTrainer, timed: run by `sluice bench train` with the interpreter of an environment that has trl.

A JSON object on standard input says what to train (`benchmarks.train_trl.order`); the last line of standard output is
{"count": samples, "seconds": S}, of the steps after the warm ones, with "peak_bytes", resident, and "points": the seconds
since training began and the mean reward of each step. It imports nothing of Sluice's, whose own dependencies that environment
need not have.

The trainer is set as suits it on CPUs: float32, no recomputation of activations, which it has by default, the whole step as
one batch, nothing written or reported. Generation is transformers' own.
"""

from __future__ import annotations

import json
import re
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    """The time from the end of the last warm step to the end of the last step, and what was sampled in it."""

    def __init__(self, answer: str, warm: int):
        self._answer = re.compile(answer, re.DOTALL)
        self._warm = warm
        self._samples = 0
        self._reward = 0.0  # mean of the newest batch
        self._started = self._begun = self._ended = 0.0
        self._points: list[tuple[float, float]] = []

    def reward(
        self, completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], label: Sequence[str], **_: Any
    ) -> Any:
        """1 for an answer that is the label, otherwise 0; the replies are counted here."""
        self._samples += len(completion_ids)
        found = [self._answer.search(completion[0]["content"]) for completion in completions]
        rewards = [float(match is not None and match.group(1) == right) for match, right in zip(found, label, strict=True)]
        self._reward = sum(rewards) / len(rewards)
        return rewards

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._ended = time.perf_counter()
        self._points.append((self._ended - self._started, self._reward))
        if state.global_step == self._warm:
            self._begun, self._samples = self._ended, 0

    def measured(self) -> dict[str, Any]:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB
        return {"count": self._samples, "seconds": self._ended - self._begun, "peak_bytes": peak, "points": self._points}


def main() -> None:
    asked = json.load(sys.stdin)
    torch.set_num_threads(asked["threads"])
    tokenizer = PreTrainedTokenizerFast.from_pretrained(asked["model"])
    prompts = [[{"role": "user", "content": question}] for question in asked["questions"]]
    if tokenizer.apply_chat_template(prompts, add_generation_prompt=True, return_dict=True)["input_ids"] != asked["tokens"]:
        raise SystemExit("transformers encodes the prompts otherwise than Sluice does")
    clock = Clock(asked["answer"], asked["warm"])
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32),
            processing_class=tokenizer,
            reward_funcs=clock.reward,
            train_dataset=Dataset.from_dict({"prompt": prompts, "label": asked["labels"]}),
            callbacks=[clock],
            args=GRPOConfig(
                output_dir=folder,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                per_device_train_batch_size=asked["samples"],
                num_generations=asked["group_size"],
                max_completion_length=asked["max_new_tokens"],
                beta=asked["kl_coefficient"],
                learning_rate=asked["learning_rate"],
                adam_beta1=asked["betas"][0],
                adam_beta2=asked["betas"][1],
                lr_scheduler_type="constant",
                max_steps=asked["warm"] + asked["steps"],
                save_strategy="no",
                logging_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
        )
        trainer.train()
    print(json.dumps(clock.measured()), flush=True)


if __name__ == "__main__":
    main()
