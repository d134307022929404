"""The warm-up, which is done once before the services start, in a process of its own."""

from __future__ import annotations

import asyncio
import json

import msgspec
from msgspec.structs import replace

from launcher.node.child import Child
from launcher.node.supervisor import Supervisor
from launcher.node.topology import ProcessSpec
from launcher.view import View
from runtime import timeouts
from runtime.config import Config
from runtime.errors import DeadlineExceeded, UserError
from runtime.tuning.warmup import cache_folder
from sluice import start


async def warm_up(supervisor: Supervisor, config: Config, view: View) -> Config:
    """Make the tiny model and its problems, unless they are cached; returns the configuration that names them.

    What names a model, or data, of its own keeps it; with both there is nothing to make.
    """
    settings = config.warmup
    assert settings is not None
    if config.model.path and config.data.train:
        return config
    folder = cache_folder(settings)
    if not folder.exists():
        view.phase("warm-up", detail="a tiny model, by supervised training")
        command = start.command("runtime.tuning.warmup", msgspec.json.encode(settings).decode())
        child = await supervisor.start(ProcessSpec(name="warmup", role="warmup", command=command, env={}), capture=True)
        deadline = settings.max_seconds + timeouts.WARM_UP_START
        try:
            await asyncio.wait_for(_follow(child, view), deadline)
        except asyncio.TimeoutError:
            raise DeadlineExceeded(child.spec.name, "run", "did not end", deadline) from None
        if child.process.returncode:
            raise child.fault()
    data = config.data
    if not data.train:
        data = replace(data, train=str(folder / "train.jsonl"), eval=data.eval or str(folder / "eval.jsonl"))
    return replace(config, model=replace(config.model, path=config.model.path or str(folder / "model")), data=data)


async def _follow(child: Child, view: View) -> None:
    """Show the warm-up's progress, until it ends. Raises UserError with its own words when it gives up."""
    assert child.process.stdout is not None
    async for line in child.process.stdout:
        told = json.loads(line)
        if told["event"] == "progress":
            target = round(100 * told["target"])
            detail = f"step {told['step']}  loss {told['loss']:.2f}  held-out accuracy {told['accuracy']:.1%}"
            view.phase("warm-up", min(target, round(100 * told["accuracy"])), target, detail)
        elif told["event"] == "error":
            raise UserError(told["message"])
    await child.process.wait()
