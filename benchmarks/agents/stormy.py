"""The agent of `sluice bench storm`: one question and its reward; where STORM says so, some episodes crash, hang, or answer
garbage, each attempt by its own lot."""

import asyncio
import os
import random
import signal

CRASH, HANG, GARBAGE = 0.10, 0.05, 0.05
STORM = os.environ.get("STORM") == "1"


async def run(data, *, episode, **_):
    lot = random.SystemRandom().random() if STORM else 1.0
    if lot < CRASH:
        os.kill(os.getpid(), signal.SIGKILL)
    if lot < CRASH + HANG:
        await asyncio.sleep(3600)
    reply = await episode.chat(data["messages"])
    if lot < CRASH + HANG + GARBAGE:
        return "garbage"
    return float((reply["content"] or "").endswith(data["label"]))
