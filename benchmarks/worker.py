"""A process that measures one thing at a time, when it is told to: `python -m benchmarks.worker CONFIG`.

It takes a JSON line `{"what": NAME, "seconds": S}` and answers `{"count": ..., "seconds": ...}`: how much was done in at
least S seconds. Between two orders it waits and takes no processor time, so that measures of several workers, and a whole
run beside them, can be taken in turn.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cached_property, partial
from itertools import count, cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from benchmarks.engines_trial import EngineTrial
from benchmarks.packing_trial import APART, TREE_TOKENS, TREES, WAYS, PackingTrial
from benchmarks.process import end
from benchmarks.random_groups import BATCHES as TRIAL_BATCHES
from runtime.cluster.topology import replicas
from runtime.config import Config, loading
from runtime.errors import ServiceFault
from runtime.process import os_process
from sluice import start

if TYPE_CHECKING:
    from benchmarks.plain_loop import PlainLoop
    from runtime.rollout.torch.engine import TorchRolloutEngine
    from runtime.scoring.scorer_torch import TorchScorer
    from runtime.trainer.step import ModelTrainer
    from runtime.types import GeneratedGroup, TrainGroup

BATCHES = 16  # different batches that the trainer and the reference are measured on


class Measured(Struct):
    """`count` things done in `seconds`."""

    count: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.count / self.seconds


def total(rounds: Iterable[Measured]) -> Measured:
    """What was done in all rounds together."""
    each = list(rounds)
    return Measured(sum(one.count for one in each), sum(one.seconds for one in each))


class Worker:
    """A measuring process, seen from the bench."""

    def __init__(self, process: asyncio.subprocess.Process):
        self._process = process

    @classmethod
    @asynccontextmanager
    async def started(
        cls, config: Config, threads: int, python: str = sys.executable, module: str = "benchmarks.worker"
    ) -> AsyncIterator[Worker]:
        """A worker that computes with so many threads; it ends with the block, and with it all that it started. So does its
        temporary folder, whatever it has left there."""
        with tempfile.TemporaryDirectory(prefix="sluice-bench-", ignore_cleanup_errors=True) as folder:
            path = Path(folder) / "config.yaml"
            path.write_text(loading.to_yaml(replace(config, run=replace(config.run, dir=folder))))
            threaded = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
            process = await asyncio.create_subprocess_exec(
                *start.command(module, str(path), python=python),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, **threaded, "TMPDIR": folder},
                start_new_session=True,
            )
            try:
                yield cls(process)
                await end(process)  # vLLM leaves files in shared memory, which its engine's end removes
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()

    async def measure(self, what: str, seconds: float) -> Measured:
        """Raises ServiceFault when the worker ended."""
        return Measured(**await self.ask({"what": what, "seconds": seconds}))

    async def ask(self, order: Mapping[str, Any]) -> Any:
        """What the worker answers. Raises ServiceFault when it ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        return await self.hear(order["what"])

    async def hear(self, what: str) -> Any:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise ServiceFault("bench worker", what, "ended without an answer")
        return json.loads(line)


class Bench:
    """What a worker can measure. Each engine is built at its first use, which is not measured."""

    def __init__(self, config: Config):
        self._config = config
        self._slots = replicas(config)["rollout-0"].max_num_seqs
        self._tried: set[str] = set()
        self.measures: dict[str, Callable[[float], Measured]] = {
            "decode": self.decode,
            "plain decode": self.plain_decode,
            "generate": self.generate,
            "reference": self.reference,
            "train": self.train,
            "train products": self.train_products,
            "products": self.products,
            "plain": self.plain,
            **{way: partial(self.trial, way) for way in WAYS},
            **{way: partial(self.trees, way) for way in (TREES, APART)},
            "passes": self.passes,
            "save": lambda _: Measured(1, self._engine_trial.save()),
            "load": lambda _: Measured(1, self._engine_trial.load()),
        }

    # ------------------------------------------------------------------------------------------ Sluice's engines

    def decode(self, seconds: float) -> Measured:
        """Tokens out of decode steps, all slots in use."""
        before = self._engine.stats().decode_tokens
        spent = self._generate(seconds)[1]
        return Measured(self._engine.stats().decode_tokens - before, spent)

    def generate(self, seconds: float) -> Measured:
        """Samples generated, all slots in use."""
        finished, spent = self._generate(seconds)
        return Measured(sum(len(group.response_tokens) for group in finished), spent)

    def reference(self, seconds: float) -> Measured:
        """Samples scored by the reference, a step's batch at a time."""
        from runtime.types import LogprobRequest

        def score(batch: Sequence[GeneratedGroup]) -> None:
            self._scorer.logprobs([LogprobRequest(group_id=group.group_id, payload=group.payload) for group in batch])

        return self._repeat(score, self._batches, seconds)

    def train(self, seconds: float) -> Measured:
        """Samples trained on, a step's batch at a time."""
        return self._repeat(self._train_step, self._train_batches, seconds)

    def train_products(self, seconds: float) -> Measured:
        """Floating-point operations of the products of one step of training; however many seconds are asked for."""
        from torch.utils.flop_counter import FlopCounterMode

        begun = time.perf_counter()
        with FlopCounterMode(display=False) as counter:
            self._train_step(self._train_batches[0])
        return Measured(counter.get_total_flops(), time.perf_counter() - begun)

    def products(self, seconds: float) -> Measured:
        """Floating-point operations of large float32 products."""
        import torch

        side = 1536
        one, other = torch.rand(2, side, side).unbind()
        begun, done = time.perf_counter(), 0
        while time.perf_counter() - begun < seconds:
            torch.mm(one, other)
            done += 2 * side**3
        return Measured(done, time.perf_counter() - begun)

    def _train_step(self, batch: Sequence[TrainGroup]) -> None:
        self.trainer.begin_step(self.trainer.step)
        self.trainer.accumulate(batch)
        self.trainer.apply()

    def step(self, number: int) -> None:
        """One step of training; the batches come round."""
        self._train_step(self._train_batches[number % BATCHES])

    def _repeat(self, work: Callable[[Any], None], batches: Sequence[Any], seconds: float) -> Measured:
        work(batches[0])
        samples = self._config.training.groups_per_step * self._config.sampling.group_size
        begun, done = time.perf_counter(), 0
        for batch in cycle(batches):
            work(batch)
            done += samples
            if time.perf_counter() - begun >= seconds:
                break
        return Measured(done, time.perf_counter() - begun)

    def _generate(self, seconds: float) -> tuple[list[GeneratedGroup], float]:
        """Keep the engine's slots full for that long; the groups that were finished, and the seconds it took."""

        async def run() -> tuple[list[GeneratedGroup], float]:
            engine = self._engine
            finished: list[GeneratedGroup] = []
            begun = time.perf_counter()
            while time.perf_counter() - begun < seconds:
                while engine.stats().waiting < self._slots:
                    engine.submit([next(self._requests)])
                finished += await engine.advance(lambda: False)
            return finished, time.perf_counter() - begun

        return asyncio.run(run())

    @cached_property
    def _engine(self) -> TorchRolloutEngine:
        import torch

        from runtime.rollout.torch.engine import TorchRolloutEngine

        config = self._config
        return TorchRolloutEngine(
            config.model.path,
            device=torch.device("cpu"),
            dtype=torch.float32,
            slots=self._slots,
            max_model_len=config.data.max_prompt_tokens + config.sampling.max_new_tokens,
        )

    @cached_property
    def _requests(self) -> Any:
        from runtime.data.prepared import training_prompts
        from runtime.data.tokenizer import Tokenizer
        from runtime.types import GroupRequest, SamplingParams

        config, tokenizer = self._config, Tokenizer(self._config.model.path)
        prompts = training_prompts(config.data, tokenizer).tokens
        sampling = SamplingParams(max_new_tokens=config.sampling.max_new_tokens, stop_token_ids=tokenizer.eos_ids)

        def requests() -> Any:
            for number in count():
                prompt = prompts[number % len(prompts)]
                yield GroupRequest(group_id=number, prompt=prompt, n=config.sampling.group_size, seed=number, sampling=sampling)

        return requests()

    @cached_property
    def _batches(self) -> list[list[GeneratedGroup]]:
        """Whole groups as they were submitted: those that finish first would be the short ones."""

        async def run() -> list[GeneratedGroup]:
            engine = self._engine
            finished: list[GeneratedGroup] = []
            while engine.has_work:
                await engine.advance(lambda: False)
            engine.submit([next(self._requests) for _ in range(BATCHES * self._config.training.groups_per_step)])
            while engine.has_work:
                finished += await engine.advance(lambda: False)
            return finished

        groups = sorted(asyncio.run(run()), key=lambda group: group.group_id)
        return [groups[index::BATCHES] for index in range(BATCHES)]

    @cached_property
    def _scorer(self) -> TorchScorer:
        import torch

        from runtime.scoring.scorer_torch import TorchScorer

        budget = self._config.services.reference.max_tokens_per_microbatch
        return TorchScorer(
            self._config.model.path, device=torch.device("cpu"), dtype=torch.float32, max_tokens_per_microbatch=budget
        )

    @cached_property
    def trainer(self) -> ModelTrainer:
        from runtime.trainer.step import policy_trainer

        return policy_trainer(self._config)

    @cached_property
    def _train_batches(self) -> list[list[TrainGroup]]:
        """Every second sample of a group is rewarded, so that all have an advantage."""
        import numpy as np

        from runtime import types
        from runtime.types import LogprobRequest, TrainGroup

        size = self._config.sampling.group_size
        rewards, valid = np.arange(size, dtype=np.float32) % 2, np.ones(size, np.uint8)

        def complete(group: GeneratedGroup) -> TrainGroup:
            (logprobs,) = self._scorer.logprobs([LogprobRequest(group_id=group.group_id, payload=group.payload)])
            tokens = group.prompt_tokens * size + sum(group.response_tokens)
            return TrainGroup(
                group_id=group.group_id,
                tokens=tokens,
                payload=group.payload,
                rewards=rewards,
                valid=valid,
                reference=types.encode(logprobs),
            )

        return [[complete(group) for group in batch] for batch in self._batches]

    # ------------------------------------------------------------------------------------------ the plain loop

    def plain_decode(self, seconds: float) -> Measured:
        """Tokens out of the plain loop's decode steps, batch after batch."""
        loop, decoded = self._plain, 0
        begun = time.perf_counter()
        while time.perf_counter() - begun < seconds:
            decoded += loop.generate(loop.prompts()[0]).decoded
        return Measured(decoded, time.perf_counter() - begun)

    def plain(self, seconds: float) -> Measured:
        """Samples generated, scored and trained on by the plain loop."""
        loop, done = self._plain, 0
        begun = time.perf_counter()
        while time.perf_counter() - begun < seconds:
            loop.step()
            done += loop.samples_per_step
        return Measured(done, time.perf_counter() - begun)

    @cached_property
    def _plain(self) -> PlainLoop:
        from benchmarks.plain_loop import PlainLoop

        return PlainLoop(self._config, seed=os.getpid())

    # ------------------------------------------------------------------------------------------ packing

    def trial(self, way: str, seconds: float) -> Measured:
        """Real tokens that steps trained on, prompts included; all batches, as often as it takes."""
        trial = self._trial
        if way not in self._tried:
            trial.step(way, 0)
            self._tried.add(way)
        begun, done = time.perf_counter(), 0
        while not done or time.perf_counter() - begun < seconds:
            for index in range(TRIAL_BATCHES):
                trial.step(way, index)
            done += trial.real_tokens
        return Measured(done, time.perf_counter() - begun)

    def trees(self, way: str, seconds: float) -> Measured:
        """Tokens of branches that steps trained on, each branch whole."""
        if way not in self._tried:
            self._trial.tree_step(way)
            self._tried.add(way)
        begun, done = time.perf_counter(), 0
        while not done or time.perf_counter() - begun < seconds:
            self._trial.tree_step(way)
            done += TREE_TOKENS
        return Measured(done, time.perf_counter() - begun)

    @cached_property
    def _trial(self) -> PackingTrial:
        return PackingTrial(self._config)

    # ------------------------------------------------------------------------------------------ engines

    def passes(self, seconds: float) -> Measured:
        """Real tokens that ran forward and backward, prompts included; one batch, as often as it takes."""
        trial = self._engine_trial
        done, spent = trial.real_tokens, trial.passes()
        while spent < seconds:
            done, spent = done + trial.real_tokens, spent + trial.passes()
        return Measured(done, spent)

    @cached_property
    def _engine_trial(self) -> EngineTrial:
        return EngineTrial(self._config)


def main() -> None:
    os_process.die_with_parent()
    bench = Bench(loading.load(Path(sys.argv[1]), ()))
    for line in sys.stdin:
        order = json.loads(line)
        measured = bench.measures[order["what"]](order["seconds"])
        print(json.dumps({"count": measured.count, "seconds": measured.seconds}), flush=True)


if __name__ == "__main__":
    main()
