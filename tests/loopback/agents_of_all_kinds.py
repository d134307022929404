"""Agents for tests: good ones, and such as fail in every way that there is. The standard library alone."""

import asyncio
import os
import signal
import subprocess
import sys
import time


async def good(data, *, base_url, api_key, episode, **_):
    episode.log(length=len(data["text"]))
    return len(data["text"])


class Whole:
    """With every method that is optional, and a process of its own that lives as long as the worker."""

    def __init__(self):
        self.before = 0

    async def setup(self, data, *, episode, **_):
        episode.log(setup=1)

    async def run(self, data, *, episode, **_):
        self.before += 1
        if data.get("hang"):
            await asyncio.sleep(3600)
        episode.reward(0.25)

    async def score(self, data, *, episode, **_):
        return 0.5

    async def cleanup(self, data, *, episode):
        episode.log(before=self.before, cleaned=1)


def plain(data, **_):
    if data.get("hang"):
        time.sleep(3600)
    return 1


async def kinds(data, *, episode, **_):
    """What `data["kind"]` names."""
    kind = data["kind"]
    if kind == "raise":
        raise RuntimeError("broken")
    if kind == "data":
        from sluice.agents import DataError

        raise DataError("row without an answer")
    if kind == "infrastructure":
        from sluice.agents import InfrastructureError

        raise InfrastructureError("the database is down")
    if kind == "exit":
        sys.exit(3)
    if kind == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "block":
        time.sleep(3600)  # noqa: ASYNC251
    if kind == "stubborn":
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                continue
    if kind == "daemon":
        marker = data["marker"]
        code = "import os, sys, time\nif os.fork() or (os.setsid() and os.fork()): os._exit(0)\ntime.sleep(3600)"
        subprocess.run([sys.executable, "-c", code, marker], check=True, timeout=60)  # noqa: ASYNC221
    if kind == "garbage":
        os.write(data.get("fd", 1), b"\xff\xfenot a message\n")
    answers = {"nothing": None, "nan": float("nan"), "text": "one", "completions": {"call-1": 1.0}, "list": [1]}
    return answers.get(kind, 1.0)


async def late(data, *, episode, **_):
    episode.stop_reason = "max_turns"
    return 0.0


async def boxed(data, *, episode, **_):
    """Two commands in one sandbox: the second one finds what the first one wrote."""
    async with episode.sandbox(data.get("spec")) as box:
        await box.run("sh", "-c", "cat > kept", stdin="kept")
        found = await box.run("sh", "-c", "cat kept; ls / | grep -c shadow")
    return float(found["stdout"].startswith("kept") and not found["reason"])
