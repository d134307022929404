"""An episode as a graph of messages: the input and the sampled reply of each call of the policy. Pure.

A node is one reply and the tokens put between the parent and the reply. A path from a root holds, bit for bit, what the engine
was given and sampled. A call continues the deepest reply that the call's history contains. If it cannot, or if another call has
continued this reply already, the graph forks; forks are counted by reason. A leaf ends a branch, which is a row to train on.
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

MOST_HELD, CALL = 1 << 24, 256  # tokens that an episode may hold; tokens that each call counts as, besides its own
NEW, EDITED, TOOLS = "new conversation", "history edited", "tools changed"
Span = tuple[PolicyVersion, PolicyVersion]  # the oldest and the newest
TWICE, NO_PREFIX = "two calls from one message", "not a prefix"


class ReplyNode(Struct, eq=False, gc=False):
    """A reply behind the tokens `given`, int32. Only parents are referred to: no cycle keeps the nodes of an ended episode."""

    parent: ReplyNode | None
    given: np.ndarray
    reply: PolicyReply
    conversation: tuple[Message, ...]  # up to and with the reply; empty if the prompt was tokens or text
    tools: tuple[Tool, ...]
    reward: float | None = None
    followed: bool = False  # another node continues this node
    text: str = ""  # the text of `tokens`; cleared when a child has a longer text that begins with it

    def path(self) -> list[ReplyNode]:
        """Return the nodes from the root to this node."""
        nodes = [self]
        while nodes[-1].parent is not None:
            nodes.append(nodes[-1].parent)
        return nodes[::-1]

    def tokens(self) -> np.ndarray:
        """Return the tokens along the path, int32: the engine's input for this reply, and the reply."""
        return np.concatenate([node.own() for node in self.path()])

    def own(self) -> np.ndarray:
        """Return this node's tokens, int32: the tokens put before the reply, and the reply."""
        return np.concatenate([self.given, self.reply.tokens])


@dataclass(frozen=True)
class Extension:
    """The position where a call continues. `prompt`: int32, the engine's whole input. `given`: the end of `prompt`, put behind
    `parent`. `forced`: the end of `given`, which begins the reply. `fork`: why the graph forks; "" if it does not."""

    parent: ReplyNode | None
    prompt: np.ndarray
    given: np.ndarray
    forced: tuple[int, ...]
    fork: str
    conversation: tuple[Message, ...]
    digests: tuple[bytes, ...]
    tools: tuple[Tool, ...]


class GraphBranch(Sample, frozen=True, kw_only=True):
    """A path from its first token to a leaf. `sampled`: index of the first token that the model wrote. `rewards`: of the turns
    that this branch trains, by the index of a turn's last token."""

    sampled: int
    rewards: dict[int, float]


class EpisodeGraph:
    """`extend` only reads and may run in a thread beside others. One thread alone calls all other methods."""

    def __init__(self, renderer: TemplateRenderer):
        self.held = 0  # tokens, including prompts that were given again
        self.forks: Counter[str] = Counter()  # by the part of the reason before the colon
        self.nodes: list[ReplyNode] = []
        self._renderer = renderer
        self._replies: dict[bytes, tuple[ReplyNode, ...]] = {}  # by the digest of the conversation up to and with the reply
        self._prefixes: set[bytes] = set()  # digests of all conversations, up to each of their messages
        self._completions: dict[str, tuple[ReplyNode, ...]] = {}

    def extend(self, call: PolicyCall) -> Extension:
        """Return where the call continues. Raises Refused if the template cannot render the call, if the tool choice names no
        tool, or if the episode is full (MOST_HELD)."""
        if self.held >= MOST_HELD:
            raise Refused(400, f"the episode holds {self.held} tokens of its calls; {MOST_HELD} are allowed", code=TOO_LONG)
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
            tools = parent.tools  # equal; share the object to save memory
            prompt = np.concatenate([parent.tokens(), given])
            conversation = parent.conversation + call.messages[len(parent.conversation) :]  # keeps parts that clients drop
        return Extension(parent, prompt, given, tuple(forced), fork, conversation, digests, tools)

    def add(self, extension: Extension, completion_id: str, replies: Sequence[PolicyReply]) -> None:
        """Add the replies to one call, as siblings. A reply without tokens makes no node."""
        parent = extension.parent
        beside = bool(self.nodes) if parent is None else parent.followed  # includes replies added since `extend`
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
        """Number of answered calls."""
        return len(self._completions)

    def turn(self, number: int) -> str:
        """Return the completion id of the answered call `number`, counted from 0. Raises Refused if there is none."""
        if not 0 <= number < len(self._completions):
            raise _unknown(f"turn {number}")
        return list(self._completions)[number]

    def reward(self, completion_id: str, value: float) -> None:
        """Set the reward of each reply of a completion, in place of an earlier reward. Raises Refused if it is unknown."""
        if completion_id not in self._completions:
            raise _unknown(completion_id)
        for node in self._completions[completion_id]:
            node.reward = value

    def history(self, completion_id: str) -> tuple[Message, ...]:
        """Return the conversation up to and with the first reply of a completion. Raises Refused if it is unknown."""
        nodes = self._completions.get(completion_id)
        if not nodes:
            raise _unknown(completion_id)
        return nodes[0].conversation

    def branches(self) -> list[GraphBranch]:
        """Return one branch for each leaf, in the order of the leaves. The first branch with a reply trains the reply."""
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
            # Given tokens get the version of the next sampled token: long runs of equal versions take no room.
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
        """Return the tokens that continue `parent`, or the reason why it cannot be continued."""
        reply, new = len(parent.reply.tokens), call.messages[len(parent.conversation) :]
        said = partial(self._text, parent)
        return self._renderer.bridge(parent.tokens(), reply, parent.conversation, new, call.tools, said)

    def _text(self, node: ReplyNode) -> str:
        """Return the text of `node.tokens()`. If the parent's text is known, decode only the node's own tokens."""
        if not (text := node.text):
            before = node.parent
            if before is not None and self._renderer.decodes_parts and (known := before.text):
                closing = before.reply.tokens[-1:] if self._renderer.ends(before.reply.tokens) else ()
                text = known + self._renderer.decode(node.own(), closing)
                before.text = ""
            node.text = text = text or self._renderer.decode(node.tokens())
        return text

    def _parent(self, call: PolicyCall, digests: Sequence[bytes]) -> tuple[ReplyNode | None, str]:
        """Return the deepest reply with the same tools that the call's history contains, and the reason of a fork."""
        parent, other_tools = None, False
        for message, digest in zip(reversed(call.messages), reversed(digests), strict=True):
            known = self._replies.get(digest, ()) if message.role == "assistant" else ()
            same = [node for node in known if node.tools == call.tools]
            if same:  # identical replies: take one that no node continues, else the last
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
        """Extend the deepest reply whose path begins the prompt."""
        parent, at, edited = None, 0, -1
        ends: dict[ReplyNode | None, int] = {None: 0}  # of the paths that begin the prompt
        for node in self.nodes:  # parents come before their children
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
    return Refused(404, f"completion: '{completion_id}' is not a completion of this episode; others are not kept", "completion")


def payload_of(group_id: int, episodes: Sequence[EpisodeGraph], task: np.ndarray) -> tuple[GroupPayload, Span | None]:
    """Return the payload of a group's episodes, and the oldest and newest version of the trained tokens (None: no such tokens).
    An episode without calls becomes a row of `task` (int32, the rendered task) without trained tokens. The prompt is the common
    prefix of all rows. It ends before the first token that the model wrote and before the last token of each row."""
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
        [TurnReward(row, at - size, value) for row, branch in enumerate(branches) for at, value in branch.rewards.items()],
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
    """Return a digest of the conversation up to and with each message. Digests ignore the formatting of JSON arguments.
    `before`: the digest of the conversation before `messages`."""
    digests = []
    for message in messages:
        # Leave out reasoning, which clients drop, and white space around replies, which some clients trim.
        content = message.content.strip() if message.role == "assistant" else message.content
        calls = [(call.id, call.name, _arguments(call)) for call in message.tool_calls]
        encoded = msgspec.json.encode((message.role, message.name, content, message.tool_call_id, calls))
        before = xxhash.xxh3_128_digest(before + encoded)
        digests.append(before)
    return digests


def _arguments(call: ToolCall) -> Any:
    try:
        return json.dumps(json.loads(call.arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return call.arguments
