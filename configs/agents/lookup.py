"""Plays the episodes of configs/agent_quickstart.yaml: OpenAI's own client, and a tool that knows the answer."""

import json

from openai import AsyncOpenAI

TURNS = 3
PARAMETERS = {"type": "object", "properties": {"key": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "lookup", "parameters": PARAMETERS}}]


def lookup(arguments, data):
    right = data["messages"][-1]["content"] == f"What is {json.loads(arguments).get('key')}?"
    return data["label"] if right else "unknown"


async def run(data, *, base_url, api_key, http_client, episode, **_):
    policy = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
    messages = data["messages"]
    for _ in range(TURNS):
        answer = (await policy.chat.completions.create(model="policy", messages=messages, tools=TOOLS)).choices[0].message
        if not answer.tool_calls:
            return float(answer.content == data["label"])
        found = [(call.id, lookup(call.function.arguments, data)) for call in answer.tool_calls]
        messages = [*messages, answer, *({"role": "tool", "tool_call_id": id, "content": text} for id, text in found)]
    episode.stop_reason = "max_turns"
    return 0.0
