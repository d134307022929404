"""The plain loop, trained until it is as accurate as wanted: `python -m benchmarks.learning_trial CONFIG`.

It takes a JSON line {"goal", "every", "steps"} and answers {"points": [[step, seconds, accuracy], ...]}: greedy accuracy on the
held-out problems before training and every so many steps, until one reaches the goal, and the seconds since training began.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from benchmarks.plain_loop import PlainLoop
from runtime.config import Config, loading
from runtime.data.tokenizer import Tokenizer
from runtime.evaluation.results import load_held_out
from runtime.process import os_process

Points = list[tuple[int, float, float]]


def learn(config: Config, goal: float, every: int, steps: int) -> Points:
    """Step, seconds and accuracy of each evaluation; the one before training is not in the seconds, the others are."""
    loop = PlainLoop(config, seed=config.run.seed)
    (held_out,) = load_held_out(config, Tokenizer(config.model.path))
    prompts = [tokens.tolist() for tokens in held_out.prompts.tokens]
    labels = [problem.label for problem in held_out.prompts.problems]
    points: Points = [(0, 0.0, loop.accuracy(prompts, labels))]
    begun = time.perf_counter()
    for step in range(1, steps + 1):
        loop.step()
        if step % every == 0:
            accuracy = loop.accuracy(prompts, labels)
            points.append((step, time.perf_counter() - begun, accuracy))
            if accuracy >= goal:
                break
    return points


def main() -> None:
    os_process.die_with_parent()
    config = loading.load(Path(sys.argv[1]), ())
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps({"points": learn(config, order["goal"], order["every"], order["steps"])}), flush=True)


if __name__ == "__main__":
    main()
