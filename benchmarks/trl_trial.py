"""Steps of TRL's GRPOTrainer, timed: run by `sluice bench train` with the interpreter of an environment that has trl.

A JSON object on standard input says what to train (`benchmarks.train_trl.order`); the last line of standard output is
{"count": samples, "seconds": S, "tokens": of the replies}, of the steps after the warm ones. It imports nothing of Sluice's,
whose own dependencies that environment need not have.

The trainer is set as suits it on CPUs: float32, no recomputation of activations, which it has by default, the whole step as
one batch, nothing written or reported. Generation is transformers' own.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

ANSWER = re.compile(r"#### (-?\d+)\s*$")


class Clock(TrainerCallback):
    """The time from the end of the last warm step to the end of the last step, and what was sampled in it."""

    def __init__(self, warm: int):
        self._warm = warm
        self._samples = self._tokens = 0
        self._begun = self._ended = 0.0

    def reward(
        self, completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], label: Sequence[str], **_: Any
    ) -> Any:
        """1 for the label after ####, otherwise 0; the replies are counted here."""
        self._samples += len(completion_ids)
        self._tokens += sum(map(len, completion_ids))
        found = [ANSWER.search(completion[0]["content"]) for completion in completions]
        return [float(match is not None and match.group(1) == right) for match, right in zip(found, label, strict=True)]

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._ended = time.perf_counter()
        if state.global_step == self._warm:
            self._begun, self._samples, self._tokens = self._ended, 0, 0

    def measured(self) -> dict[str, float]:
        return {"count": self._samples, "seconds": self._ended - self._begun, "tokens": self._tokens}


def main() -> None:
    asked = json.load(sys.stdin)
    torch.set_num_threads(asked["threads"])
    tokenizer = PreTrainedTokenizerFast.from_pretrained(asked["model"])
    prompts = [[{"role": "user", "content": question}] for question in asked["questions"]]
    if tokenizer.apply_chat_template(prompts, add_generation_prompt=True, return_dict=True)["input_ids"] != asked["tokens"]:
        raise SystemExit("transformers encodes the prompts otherwise than Sluice does")
    clock = Clock(asked["warm"])
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
