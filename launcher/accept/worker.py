"""One check of `sluice accept`, in a process of its own: prints its figures as one JSON line, or ends with an error. `python -m
launcher.accept.worker CHECK DEVICE FOLDER`"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from runtime import timeouts, types
from runtime.config import Config
from runtime.errors import DeadlineExceeded, UserError
from runtime.process import network
from runtime.process import platform as own
from runtime.types import GroupPayload, GroupRequest, PolicyVersion, Sample, SamplingParams, TrainGroup
from runtime.weights.plan import GroupAddress, Manifest, TensorSpec
from sluice import start


Figures = dict[str, Any]

TENSORS, ELEMENTS, BUCKET = 16, 1 << 20, 16 << 20  # the weight sync sends 64 MiB of float32 in buckets of 16 MiB
VERSIONS = 3
TOLERANCE = 0.05  # between a device's figures in float32 and the CPU's: devices may multiply in fewer bits


def platform(device: str, folder: Path) -> Figures:
    """Check device, memory, random state, and a product in bfloat16. Make a tiny model for the checks of the engines."""

    from runtime.models import tiny_model

    where = own.device(device)
    memory = own.memory(where)
    if not 0 < memory.available <= memory.total:
        raise AssertionError(f"memory figures are {memory}")
    state = own.rng_state(where)
    first = torch.rand(64, device=where).cpu()
    own.set_rng_state(where, state)
    if not torch.equal(torch.rand(64, device=where).cpu(), first):
        raise AssertionError("the random state was not restored")
    a, b = torch.randn(2, 256, 256, dtype=torch.float64).unbind(0)
    product = (a.to(where, torch.bfloat16) @ b.to(where, torch.bfloat16)).cpu().double()
    own.synchronize(where)
    error = float((product - a @ b).norm() / (a @ b).norm())
    if not error < 0.02:
        raise AssertionError(f"a product in bfloat16 is off by {error:.1%}")
    folder.mkdir()
    shape = tiny_model.Shape(hidden_size=64, layers=2, heads=4, kv_heads=2, intermediate_size=128)
    tiny_model.make_model(shape, tiny_model.write_tokenizer(folder)).save_pretrained(folder)
    module = None if where.type == "cpu" else torch.get_device_module(where.type)
    count, name = (1, "CPU") if module is None else (module.device_count(), str(module.get_device_name(0)))
    return {"devices": count, "name": name, "memory_bytes": memory.total, "bfloat16_error": error}


def weight_sync(device: str, folder: Path) -> Figures:
    """Send weights to another process over the device's backend. A transfer must end by its deadline if that process stops."""

    from runtime.weights.group import Shard
    from runtime.weights.sender import SendBuffers, open_rendezvous

    where = own.device(device)
    backend = own.collective_backend("auto", where)
    pending = open_rendezvous(
        GroupAddress(epoch=1, world_size=2, backend=backend, timeout=timeouts.ACCEPT_TRANSFER), network.loopback()
    )
    manifest = _manifest()
    sender = SendBuffers(manifest, pin=where.type == "cuda")
    with _receiver(device, folder, pending.address) as receiver:
        began = time.monotonic()
        group = pending.connect()
        joined = time.monotonic() - began
        rates = []
        for version in range(VERSIONS):
            _heard(receiver, "posted")
            sender.begin(PolicyVersion(0, version), timeouts.ACCEPT_TRANSFER)
            tensors = [torch.full((ELEMENTS,), float(version + index)) for index in range(TENSORS)]
            sender.fill(Shard(index, (), tensor) for index, tensor in enumerate(tensors))
            sent = sender.send(group, PolicyVersion(0, version), timeouts.ACCEPT_TRANSFER).result(timeouts.ACCEPT_TRANSFER)
            _heard(receiver, "whole")
            rates.append(sent.bytes / sent.seconds / 1e6)
        _heard(receiver, "posted")
        os.kill(receiver.pid, signal.SIGSTOP)
        sending, began = sender.send(group, PolicyVersion(0, VERSIONS), timeouts.ACCEPT_STALLED), time.monotonic()
        with suppress(DeadlineExceeded):
            sending.result(timeouts.ACCEPT_TRANSFER)
            raise AssertionError("a transfer to a process that is stopped did not fail")
        seconds = time.monotonic() - began
    return {"backend": backend, "join_seconds": joined, "MB_per_second": max(rates), "abort_seconds": seconds}


def _manifest() -> Manifest:
    return Manifest(tuple(TensorSpec(f"tensor.{index}", "float32", (ELEMENTS,)) for index in range(TENSORS)), BUCKET)


@contextmanager
def _receiver(device: str, folder: Path, address: GroupAddress) -> Iterator[subprocess.Popen[str]]:
    command = start.command("launcher.accept.worker", "receiver", device, str(folder))
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    try:
        process.stdin.write(msgspec.json.encode(msgspec.structs.replace(address, rank=1)).decode() + "\n")  # with the key
        process.stdin.flush()
        yield process
    finally:
        process.kill()
        process.communicate()


def _heard(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    if (line := process.stdout.readline().strip()) != word:
        raise AssertionError(f"the receiver said {line!r}, not {word!r}")


def receiver(device: str) -> None:
    """Run the other process of `weight_sync`, on the second device if there are several."""

    from runtime.weights.receiver import StagedWeights
    from runtime.weights.sender import join_rendezvous

    own.device(device, 0 if device == "cpu" else 1)
    group = join_rendezvous(msgspec.json.decode(sys.stdin.readline(), type=GroupAddress), "receiver")
    staged = StagedWeights(_manifest())
    for version in range(VERSIONS + 1):
        print("posted", flush=True)
        staged.receive([group], PolicyVersion(0, version), timeouts.ACCEPT_TRANSFER)
        whole = all(
            torch.equal(tensor, torch.full_like(tensor, version + index))
            for index, tensor in enumerate(staged.tensors().values())
        )
        staged.release()
        print("whole" if whole else f"version {version} is not what was sent", flush=True)


def rollout(device: str, folder: Path) -> Figures:
    """Compare the log-probabilities of the embedded rollout engine with the CPU's, also of weights staged meanwhile."""

    from runtime.models.hf_folder import WeightFiles
    from runtime.rollout.torch.engine import TorchRolloutEngine

    where, prompt, count = own.device(device), np.arange(1, 9, dtype=np.int32), 32
    engine = TorchRolloutEngine(str(folder), device=where, dtype=torch.float32, slots=8, max_model_len=64)

    async def generate() -> GroupPayload:
        sampling = SamplingParams(max_new_tokens=count)
        engine.submit([GroupRequest(group_id=0, prompt=prompt, n=8, seed=1, sampling=sampling)])
        staging = asyncio.ensure_future(engine.stage(dict(WeightFiles(folder))))
        groups = await engine.advance(staging.done)  # decodes until the weights are staged
        await staging  # raises its error
        await engine.swap(PolicyVersion(0, 1), recompute=True)  # between two steps, with samples under way
        while not groups:
            groups = await engine.advance(lambda: False)  # decodes to the end with the new weights
        await engine.close()
        return types.decode(GroupPayload, groups[0].payload)

    began = time.monotonic()
    samples = asyncio.run(generate()).samples
    seconds = time.monotonic() - began
    worst = max(float(np.abs(sample.logprobs - _expected(folder, prompt, sample.tokens)).max()) for sample in samples)
    if not worst < TOLERANCE:
        raise AssertionError(f"log-probabilities differ from the CPU's by up to {worst:.3f}")
    return {"tokens_per_second": sum(len(sample.tokens) for sample in samples) / seconds, "logprob_difference": worst}


def _expected(folder: Path, prompt: Any, reply: Any) -> Any:
    """Return the log-probabilities of `reply` by the stock model on the CPU, float32 [R]."""
    from transformers import AutoModelForCausalLM

    factory: Any = AutoModelForCausalLM
    tokens = torch.from_numpy(np.concatenate([prompt, reply]).astype(np.int64))
    with torch.no_grad():
        model = factory.from_pretrained(folder, local_files_only=True, use_safetensors=True).float()
        logits = model(tokens[None]).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, tokens[len(prompt) :, None])[:, 0].numpy()


def random_groups(config: Config, lengths: Sequence[Sequence[tuple[int, list[int]]]]) -> list[list[TrainGroup]]:
    """Return the groups of each batch. `lengths`: of each prompt and its replies. Every second sample is rewarded."""
    vocabulary = json.loads((Path(config.model.path) / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    random = np.random.default_rng(1)

    def reply(length: int) -> Sample:
        return Sample(
            tokens=random.integers(0, vocabulary, length).astype(np.int32),
            loss_mask=np.ones(length, np.uint8),
            logprobs=random.normal(-math.log(vocabulary), 0.3, length).astype(np.float32),
            versions=np.full(length, PolicyVersion(0, 0).pack(), np.int64),
            finish_reason="stop",
        )

    def group(number: int, asked: int, replied: list[int]) -> TrainGroup:
        prompt = random.integers(0, vocabulary, asked).astype(np.int32)
        payload = GroupPayload.of(number, prompt, [reply(length) for length in replied])
        size = len(replied)
        return TrainGroup(
            group_id=number,
            tokens=asked * size + sum(replied),
            payload=types.encode(payload),
            rewards=np.arange(size, dtype=np.float32) % 2,
            valid=np.ones(size, np.uint8),
        )

    return [[group(number, *each) for number, each in enumerate(batch)] for batch in lengths]


def trainer(device: str, folder: Path) -> Figures:
    """Run two steps of the embedded trainer: loss and gradient norm must be those of the CPU."""

    from runtime.trainer.step import policy_trainer

    sections = {
        "run": {"name": "accept"},
        "model": {"path": str(folder), "dtype": "float32"},
        "data": {"max_prompt_tokens": 24},
        "sampling": {"max_new_tokens": 24},
        "training": {"groups_per_step": 4},
    }
    config = msgspec.convert(sections, Config)
    replies = [10, 16, 20, 24] * (config.sampling.group_size // 4)
    groups = random_groups(config, [[(prompt, replies) for prompt in (16, 18, 21, 24)]] * 2)
    found: dict[str, list[float]] = {}
    began = 0.0
    for where in (torch.device("cpu"), own.device(device)):
        engine = policy_trainer(config, device=where)
        began = time.monotonic()
        for step, batch in enumerate(groups):
            engine.begin_step(step)
            engine.accumulate(batch)
            metrics = engine.apply().metrics
            for name in ("actor/pg_loss", "actor/grad_norm"):
                found.setdefault(name, []).append(metrics[name])
    seconds = (time.monotonic() - began) / len(groups)
    for name, values in found.items():
        expected, got = values[: len(groups)], values[len(groups) :]
        if not all(math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=1e-4) for one, other in zip(expected, got, strict=True)):
            raise AssertionError(f"{name} is {got}, on the CPU {expected}")
    return {"step_seconds": seconds, "grad_norm": found["actor/grad_norm"][-1]}


CHECKS: dict[str, Callable[[str, Path], Figures]] = {each.__name__: each for each in (platform, weight_sync, rollout, trainer)}


def main(arguments: list[str]) -> None:
    name, device, folder = arguments[:3]
    if name == "receiver":
        receiver(device)
        return
    try:
        print(json.dumps(CHECKS[name](device, Path(folder))), flush=True)
    except UserError as error:
        sys.exit(f"error: {error}")
    os._exit(0)  # not by the interpreter's end, where threads of an abandoned collective would call abort


if __name__ == "__main__":
    main(sys.argv[1:])
