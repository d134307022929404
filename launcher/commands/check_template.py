"""`sluice check-template MODEL`: whether conversations go on token for token with a model's chat template, and where not."""

from __future__ import annotations

import argparse
import json
from collections import Counter

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from rich.console import Console

from runtime.data.tokenizer import Tokenizer
from runtime.gateway.conversation import Message, PolicyCall, PolicyReply, Refused
from runtime.gateway.graph import EpisodeGraph, Extension, ReplyNode
from runtime.gateway.rendering import ProbeConversation, TemplateRenderer, conversations, renderer_of
from runtime.telemetry.shown import LiteralTable, say


class TemplateOutcome(Struct, frozen=True):
    """The outcome of a conversation: how its replies were continued, where they forked, and what was refused."""

    name: str
    ways: Counter[str]
    forks: dict[str, list[str]]  # numbers of messages by reason
    refused: str


def run(options: argparse.Namespace) -> int:
    """Print what becomes of each conversation. Return 1 if one forks or a reply is not read as it was written, else 0. Raises
    UserError for a folder without a model."""
    model = options.model
    renderer = renderer_of(Tokenizer(str(model), key="check-template"), options.tool_format, model)
    outcomes = [play(renderer, conversation) for conversation in conversations()]
    table = LiteralTable("conversation", "how it goes on", "where it would be rendered anew, or is refused")
    for outcome in outcomes:
        how = ", ".join(f"{way} x {count}" for way, count in outcome.ways.items())
        where = [f"message{'s' * (len(at) > 1)} {', '.join(at)}: {why}" for why, at in outcome.forks.items()]
        table.add_row(outcome.name, how, "\n".join([*where, outcome.refused]).strip())
    console = Console()
    console.print(table)
    forked = sum(bool(outcome.forks) for outcome in outcomes)
    refused = sum(bool(outcome.refused) for outcome in outcomes)
    calls = renderer.format_name if renderer.takes_tools else "none"
    say(console, f"calls of tools: {calls}; {'separates' if renderer.thinks else 'does not separate'} reasoning")
    read = [_is_read(renderer, message, probe) for probe in conversations() for message in probe.messages if message.tool_calls]
    if renderer.takes_tools:
        say(console, f"{sum(read)} of {len(read)} replies with calls are read as they were written")
    say(
        console,
        f"{len(outcomes)} conversations: {len(outcomes) - forked - refused} go on token for token, {forked} would be "
        f"rendered anew, {refused} are refused",
    )
    return 1 if forked or (renderer.takes_tools and not all(read)) else 0


def play(renderer: TemplateRenderer, probe: ProbeConversation) -> TemplateOutcome:
    """Play a conversation whose replies the model would write, and whose client drops the reasoning."""
    graph, ways, forks = EpisodeGraph(renderer), Counter[str](), dict[str, list[str]]()
    for index, message in enumerate(probe.messages):
        if message.role == "assistant":
            sent = tuple(replace(each, reasoning="") for each in probe.messages[:index])
            try:
                extension = graph.extend(PolicyCall(messages=sent, tools=probe.tools))
            except Refused as refused:
                return TemplateOutcome(probe.name, ways, forks, f"message {index}: {refused}")
            if extension.fork:
                forks.setdefault(extension.fork, []).append(str(index))
            elif extension.parent is not None:
                ways[_way(renderer, extension.parent, extension)] += 1
            graph.add(extension, str(index), [_reply(renderer, message)])
    return TemplateOutcome(probe.name, ways, forks, "")


def _reply(renderer: TemplateRenderer, message: Message) -> PolicyReply:
    said = message if renderer.thinks else replace(message, reasoning="")
    tokens = np.array(renderer.write(said), np.int32)
    return PolicyReply(said, tokens, np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int64), "stop")


def _is_read(renderer: TemplateRenderer, message: Message, probe: ProbeConversation) -> bool:
    """Return whether the calls of a reply are read as the model would write them."""
    alone = replace(message, content="", reasoning="")
    found = renderer.parse((), renderer.write(alone), probe.tools)[0].tool_calls
    pairs = [[(call.name, json.loads(call.arguments)) for call in calls] for calls in (found, message.tool_calls)]
    return pairs[0] == pairs[1]


def _way(renderer: TemplateRenderer, parent: ReplyNode, extension: Extension) -> str:
    new, reply = extension.conversation[len(parent.conversation) :], len(parent.reply.tokens)
    known = renderer.family_bridge(parent.tokens(), reply, new, extension.tools)
    return "difference" if known is None else "renderers"
