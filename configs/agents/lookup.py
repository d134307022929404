"""Plays the episodes of configs/agent_quickstart.yaml: OpenAI's own client, and a tool that knows the answer."""

import asyncio
import json
import os

from openai import APIStatusError, AsyncOpenAI, RateLimitError

URL, AT_ONCE, TURNS = os.environ["SLUICE_GATEWAY_URL"], 64, 3
PARAMETERS = {"type": "object", "properties": {"key": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "lookup", "parameters": PARAMETERS}}]


def lookup(arguments, task):
    right = task["messages"][-1]["content"] == f"What is {json.loads(arguments).get('key')}?"
    return task["label"] if right else "unknown"


async def play(policy, task):
    messages = task["messages"]
    for _ in range(TURNS):
        answer = (await policy.chat.completions.create(model="policy", messages=messages, tools=TOOLS)).choices[0].message
        if not answer.tool_calls:
            return float(answer.content == task["label"])
        told = [(call.id, lookup(call.function.arguments, task)) for call in answer.tool_calls]
        messages = [*messages, answer, *({"role": "tool", "tool_call_id": id, "content": text} for id, text in told)]
    return 0.0


async def player(gateway):
    while True:
        try:
            episode = await gateway.post("/episodes", body={"wait": 30}, cast_to=object)
        except RateLimitError:  # no task waits
            continue
        policy, path = gateway.with_options(api_key=episode["key"]), f"/episodes/{episode['id']}"
        try:
            reward = await play(policy, episode["task"])
            await policy.post(f"{path}/reward", body={"reward": reward}, cast_to=object)
            await policy.post(f"{path}/end", body={}, cast_to=object)
        except APIStatusError as error:
            print(path, error)


async def main():
    async with AsyncOpenAI(base_url=f"{URL}/v1", api_key=os.environ["SLUICE_GATEWAY_KEY"] or "none") as gateway:
        await asyncio.gather(*(player(gateway) for _ in range(AT_ONCE)))


asyncio.run(main())
