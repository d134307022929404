"""An episode as a graph of messages: what each call of the policy was given, and what it sampled. Pure.

A node is one reply with the tokens that were put before it, behind its parent: along a path from a root they are, bit for bit,
what the engine was given and sampled. A call goes on behind the deepest reply that its history contains. Where it cannot, or
where another call went on there before, the graph forks, which is counted by reason. A leaf ends a branch: a row to train on.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np
import xxhash
from msgspec import Struct

from runtime.gateway.conversation import TOO_LONG, Message, PolicyCall, PolicyReply, Refused, Tool, ToolCall
from runtime.gateway.rendering import TemplateRenderer
from runtime.types import GroupPayload, PolicyVersion, RoutedExperts, Sample, TokenSets, TurnReward, common

MOST_HELD, CALL = 1 << 24, 256  # tokens that an episode may hold, among which each call counts as some more
NEW, EDITED, TOOLS = "new conversation", "history edited", "tools changed"
TWICE, NO_PREFIX = "two calls from one message", "not a prefix"


class ReplyNode(Struct, eq=False, gc=False):
    """One reply. `given`: int32, what was put before it, the tokens it was forced to begin with included. Nodes know what
    is before them alone: those of an episode that is over are freed at once."""

    parent: ReplyNode | None
    given: np.ndarray
    reply: PolicyReply
    conversation: tuple[Message, ...]  # up to and with the reply; empty where tokens or text were asked
    tools: tuple[Tool, ...]
    reward: float | None = None
    followed: bool = False  # by another
    text: str = ""  # of `tokens`, until another has one that begins with it

    def path(self) -> list[ReplyNode]:
        """From the root to this node."""
        nodes = [self]
        while nodes[-1].parent is not None:
            nodes.append(nodes[-1].parent)
        return nodes[::-1]

    def tokens(self) -> np.ndarray:
        """int32, along the path: what the engine was given for this reply, and the reply."""
        return np.concatenate([node.own() for node in self.path()])

    def own(self) -> np.ndarray:
        """int32: what was put before the reply, and the reply."""
        return np.concatenate([self.given, self.reply.tokens])


@dataclass(frozen=True)
class Extension:
    """Where a call goes on. `prompt`: int32, all that the engine is given; `given`: its end, which is put behind `parent`;
    `forced`: the end of that, by which the reply is made to begin. `fork`: why the graph forks; "" where it does not."""

    parent: ReplyNode | None
    prompt: np.ndarray
    given: np.ndarray
    forced: tuple[int, ...]
    fork: str
    conversation: tuple[Message, ...]
    digests: tuple[bytes, ...]
    tools: tuple[Tool, ...]


class GraphBranch(Sample, frozen=True, kw_only=True):
    """A path to a leaf, from its first token on. `sampled`: index of the first one that the model wrote; `rewards`: those of
    the turns that are trained here, by the index of a turn's last token."""

    sampled: int
    rewards: dict[int, float]


class EpisodeGraph:
    """`extend` changes nothing and may run in a thread beside others; everything else is called by one thread alone."""

    def __init__(self, renderer: TemplateRenderer):
        self.held = 0  # tokens, those of prompts that were given again too
        self.forks: Counter[str] = Counter()  # by what stands before the colon of the reason
        self.nodes: list[ReplyNode] = []
        self._renderer = renderer
        self._replies: dict[bytes, tuple[ReplyNode, ...]] = {}  # by the digest of the conversation up to and with each
        self._prefixes: set[bytes] = set()  # digests of all conversations up to each of their messages
        self._completions: dict[str, tuple[ReplyNode, ...]] = {}

    def extend(self, call: PolicyCall) -> Extension:
        """Raises Refused for what the model's template cannot render, for a tool choice that is none of the tools, and where
        the episode holds as much as one may."""
        if self.held >= MOST_HELD:
            raise Refused(400, f"the episode holds {self.held} tokens of its calls; one may hold {MOST_HELD}", code=TOO_LONG)
        if call.tokens is not None or call.text is not None:
            ids = call.tokens if call.tokens is not None else self._renderer.encode(call.text or "")
            return self._by_tokens(np.array(ids, np.int32))
        forced = self._renderer.forced(call.tool_choice, call.tools)
        digests = tuple(_digests(call.messages))
        parent, fork = self._parent(call, digests)
        added: list[int] | str = ""
        if parent is not None:
            added = self._behind(parent, call)
            if isinstance(added, str):
                parent, fork = None, fork or f"{NO_PREFIX}: {added}"
        if isinstance(added, str):
            added = self._renderer.render(call.messages, call.tools)
        given = np.array([*added, *forced], np.int32)
        prompt, conversation, tools = given, call.messages, call.tools
        if parent is not None:
            tools = parent.tools  # the same, which need not be kept twice
            prompt = np.concatenate([parent.tokens(), given])
            conversation = parent.conversation + call.messages[len(parent.conversation) :]  # what clients drop is kept
        return Extension(parent, prompt, given, tuple(forced), fork, conversation, digests, tools)

    def add(self, extension: Extension, completion_id: str, replies: Sequence[PolicyReply]) -> None:
        """The replies to one call: siblings where there are several. One without tokens is no node."""
        parent = extension.parent
        beside = bool(self.nodes) if parent is None else parent.followed  # what came since the call was extended, too
        if fork := extension.fork or (beside and (NEW if parent is None else TWICE)) or "":
            self.forks[fork.partition(":")[0]] += 1
        conversation = extension.conversation
        self.held += CALL + len(extension.given) + sum(len(reply.tokens) for reply in replies)
        nodes = []
        self._prefixes.update(extension.digests)
        for reply in replies:
            if len(reply.tokens):
                whole = (*conversation, reply.message) if conversation else ()
                nodes.append(node := ReplyNode(parent, extension.given, reply, whole, extension.tools))
                if conversation:
                    (digest,) = _digests([reply.message], extension.digests[-1])
                    self._prefixes.add(digest)
                    self._replies[digest] = (*self._replies.get(digest, ()), node)
        self.nodes += nodes
        if parent is not None and nodes:
            parent.followed = True
        self._completions[completion_id] = tuple(nodes)

    @property
    def calls(self) -> int:
        """Those that were answered."""
        return len(self._completions)

    def turn(self, number: int) -> str:
        """The completion id of the call that was answered as the one of that number, from 0. Raises Refused."""
        if not 0 <= number < len(self._completions):
            raise _unknown(f"turn {number}")
        return list(self._completions)[number]

    def reward(self, completion_id: str, value: float) -> None:
        """What a completion earned: each of its replies. Replaces what it was given before. Raises Refused."""
        if completion_id not in self._completions:
            raise _unknown(completion_id)
        for node in self._completions[completion_id]:
            node.reward = value

    def history(self, completion_id: str) -> tuple[Message, ...]:
        """The conversation up to and with the first reply of a completion. Raises Refused."""
        nodes = self._completions.get(completion_id)
        if not nodes:
            raise _unknown(completion_id)
        return nodes[0].conversation

    def branches(self) -> list[GraphBranch]:
        """One for each leaf, in the order in which leaves were made. A reply is trained in the first branch that has it."""
        trained: set[ReplyNode] = set()
        found = []
        for leaf in self.nodes:
            if not leaf.followed:
                path = leaf.path()
                found.append(self._branch(path, trained))
                trained.update(path)
        return found

    def _branch(self, path: Sequence[ReplyNode], trained: set[ReplyNode]) -> GraphBranch:
        mask, logprobs, versions = [], [], []
        kept: list[TokenSets | None] = []
        rewards: dict[int, float] = {}
        length = 0
        for node in path:
            given, reply = len(node.given), node.reply
            length += given + len(reply.tokens)
            new = node not in trained
            if new and node.reward is not None:
                rewards[length - 1] = node.reward
            mask += [np.zeros(given, np.uint8), np.full(len(reply.tokens), new, np.uint8)]
            logprobs += [np.zeros(given, np.float32), reply.logprobs if new else np.zeros_like(reply.logprobs)]
            # Tokens that were given have the version of the one sampled next: long runs of equal versions take no room.
            versions += [np.full(given, reply.versions[0], np.int64), reply.versions]
            kept += [None, reply.kept if new else None]
        return GraphBranch(
            tokens=path[-1].tokens(),
            loss_mask=np.concatenate(mask),
            logprobs=np.concatenate(logprobs),
            versions=np.concatenate(versions),
            finish_reason="length" if path[-1].reply.end == "length" else "stop",
            kept=TokenSets.joined(kept, [len(part) for part in mask]),
            experts=RoutedExperts.joined([node.reply.experts for node in path]),
            sampled=len(path[0].given),
            rewards=rewards,
        )

    def _behind(self, parent: ReplyNode, call: PolicyCall) -> list[int] | str:
        """What continues `parent`, or why nothing does."""
        reply, new = len(parent.reply.tokens), call.messages[len(parent.conversation) :]
        said = partial(self._text, parent)
        return self._renderer.bridge(parent.tokens(), reply, self._ends(parent), parent.conversation, new, call.tools, said)

    def _ends(self, node: ReplyNode) -> bool:
        return int(node.reply.tokens[-1]) in self._renderer.stop_ids

    def _text(self, node: ReplyNode) -> str:
        """Of all its tokens. Only what it adds is decoded, where the text of its parent is known."""
        if not (text := node.text):
            before = node.parent
            if before is not None and self._renderer.decodes_parts and (known := before.text):
                text = known + self._renderer.decode(node.own(), before.reply.tokens[-1:] if self._ends(before) else ())
                before.text = ""
            node.text = text = text or self._renderer.decode(node.tokens())
        return text

    def _parent(self, call: PolicyCall, digests: Sequence[bytes]) -> tuple[ReplyNode | None, str]:
        """The deepest reply, with the same tools, that the call's history contains; and why this is a fork."""
        parent, other_tools = None, False
        for message, digest in zip(reversed(call.messages), reversed(digests), strict=True):
            known = self._replies.get(digest, ()) if message.role == "assistant" else ()
            same = [node for node in known if node.tools == call.tools]
            if same:  # several are alike to the letter: one that nobody went on from, else the last
                parent = next((node for node in same if not node.followed), same[-1])
                break
            other_tools = other_tools or bool(known)
        if other_tools:
            return parent, TOOLS
        if not (self.nodes if parent is None else parent.followed):
            return parent, ""
        unknown = next((at for at, digest in enumerate(digests) if digest not in self._prefixes), len(digests))
        behind = call.messages[len(parent.conversation) if parent else 0 :]
        if 0 < unknown < len(digests) and any(message.role == "assistant" for message in behind):
            return parent, f"{EDITED}: message {unknown}"
        return parent, NEW if parent is None and unknown < len(digests) else TWICE

    def _by_tokens(self, prompt: np.ndarray) -> Extension:
        """Behind the deepest reply whose path the prompt begins with."""
        parent, at, edited = None, 0, -1
        ends: dict[ReplyNode | None, int] = {None: 0}  # of the paths that the prompt begins with
        for node in self.nodes:  # each behind its parent
            if (begin := ends.get(node.parent)) is None:
                continue
            own = node.own()
            end = begin + common(own, prompt[begin:])
            if end == begin + len(own):
                ends[node] = end
                if end > at or (end == at and not node.followed):
                    parent, at = node, end
            elif end > begin + len(node.given):
                edited = max(edited, end)
        fork = ""
        if edited > at:
            fork = f"{EDITED}: token {edited}"
        elif parent is not None and parent.followed:
            fork = TWICE
        elif parent is None and self.nodes:
            roots = [node.given for node in self.nodes if node.parent is None]
            fork = TWICE if any(np.array_equal(given, prompt) for given in roots) else NEW
        return Extension(parent, prompt, prompt[at:], (), fork, (), (), ())


def _unknown(completion_id: str) -> Refused:
    return Refused(
        404, f"completion: '{completion_id}' is none of this episode; calls of no episode are not kept", "completion"
    )


def payload_of(
    group_id: int, episodes: Sequence[EpisodeGraph], task: np.ndarray
) -> tuple[GroupPayload, tuple[PolicyVersion, PolicyVersion] | None]:
    """A group's episodes, and the oldest and newest version of the tokens to train on; None where there are none.

    An episode that made no call is a row of `task` (int32, its rendered task), of which nothing is trained. What all rows begin
    with is the prompt, short of every token that the model wrote, and of the last of every row.
    """
    played = [episode.branches() for episode in episodes]
    sampled = [branch.versions[branch.loss_mask != 0] for branches in played for branch in branches]
    versions = np.concatenate([np.zeros(0, np.int64), *sampled])
    idle = _idle(task, int(versions.max(initial=0)))
    branches = [branch for each in played for branch in each or [idle]]
    size = min(min(branch.sampled, len(branch.tokens) - 1) for branch in branches)
    for branch in branches:
        size = common(branches[0].tokens[:size], branch.tokens)
    payload = GroupPayload.of(
        group_id,
        branches[0].tokens[:size],
        [branch.part(slice(size, None)) for branch in branches],
        [len(each or [idle]) for each in played],
        [
            TurnReward(row, token - size, value)
            for row, branch in enumerate(branches)
            for token, value in branch.rewards.items()
        ],
    )
    if not len(versions):
        return payload, None
    return payload, (PolicyVersion.unpack(int(versions.min())), PolicyVersion.unpack(int(versions.max())))


def _idle(task: np.ndarray, version: int) -> GraphBranch:
    tokens = task if len(task) else np.zeros(1, np.int32)
    size = len(tokens)
    return GraphBranch(
        tokens=tokens,
        loss_mask=np.zeros(size, np.uint8),
        logprobs=np.zeros(size, np.float32),
        versions=np.full(size, version, np.int64),
        finish_reason="abort",
        sampled=size,
        rewards={},
    )


def _digests(messages: Sequence[Message], before: bytes = b"") -> list[bytes]:
    """Of the conversation up to and with each message: equal where it is the same conversation, in whichever words of JSON.
    `before`: of what goes before them."""
    digests = []
    for message in messages:
        # Reasoning is left out: clients drop it; and so is white space around replies, which some of them trim.
        content = message.content.strip() if message.role == "assistant" else message.content
        calls = [(call.id, call.name, _arguments(call)) for call in message.tool_calls]
        told = msgspec.json.encode((message.role, message.name, content, message.tool_call_id, calls))
        before = xxhash.xxh3_128_digest(before + told)
        digests.append(before)
    return digests


def _arguments(call: ToolCall) -> Any:
    try:
        return json.dumps(json.loads(call.arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return call.arguments
