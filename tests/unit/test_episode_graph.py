"""An episode's graph: what the engine was given and sampled, bit for bit; each sampled token is trained once, no other ever."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from runtime import types
from runtime.data.tokenizer import Tokenizer
from runtime.errors import InvalidMessage
from runtime.gateway import graph as product
from runtime.gateway.conversation import TOO_LONG, Message, PolicyCall, PolicyReply, Refused, Tool, ToolCall
from runtime.gateway.graph import EpisodeGraph, payload_of
from runtime.gateway.rendering import TemplateRenderer
from runtime.types import GroupPayload, PolicyVersion, TokenSets, encode_set
from tests.unit import template_cases as cases

TOOLS = (Tool("add", "Adds."), Tool("look_up", "Finds."))
FEWER = TOOLS[:1]
END, OTHER_END = cases.special("<|im_end|>"), cases.special("<|endoftext|>")


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> TemplateRenderer:
    return TemplateRenderer(cases.tokenizer_of(tmp_path_factory.mktemp("model"), cases.HERMES, eos_token_id=[END, OTHER_END]))


class Engine:
    """Answers with given tokens. Every token that it samples has a log-probability of its own, by which it is known again."""

    def __init__(self, renderer: TemplateRenderer, graph: Any):
        self.renderer, self.graph = renderer, graph
        self.served: list[tuple[list[int], PolicyReply]] = []  # what it was given, and what it sampled
        self._sampled = 0

    def sample(self, ids: Sequence[int], forced: Sequence[int], tools: Sequence[Tool]) -> PolicyReply:
        size = len(ids)
        own = -np.arange(self._sampled + 1, self._sampled + size + 1, dtype=np.float32)
        self._sampled += size
        versions = np.sort(np.arange(size, dtype=np.int64) // 3 + len(self.served) // 2)
        end = "stop" if ids[-1] in self.renderer.stop_ids else "length"
        message, _ = self.renderer.parse(forced, ids, tools)
        reason = "tool_calls" if message.tool_calls else end
        # Every other reply's tokens were drawn from two tokens each.
        vocabulary = self.renderer.tokenizer.vocab_size
        pairs = [encode_set(np.array([token, (token + 1) % vocabulary], np.int32), vocabulary) for token in ids]
        sets = TokenSets.of(pairs, vocabulary) if len(self.served) % 2 else None
        return PolicyReply(message, np.array(ids, np.int32), own, versions, reason, kept=sets)

    def answer(self, extension: Any, replies: Sequence[Sequence[int]], tools: Sequence[Tool] = ()) -> list[Message]:
        found = [self.sample(ids, extension.forced, tools) for ids in replies]
        self.graph.add(extension, f"completion-{len(self.served)}", found)
        self.served += [(extension.prompt.tolist(), reply) for reply in found]
        return [reply.message for reply in found]

    def call(self, messages: Sequence[Message], reply: str = "Yes.", **fields: Any) -> tuple[Message, ...]:
        """A call with one reply, and the history with it."""
        call = PolicyCall(messages=tuple(messages), **fields)
        ids = [*self.renderer.encode(reply), END]
        return (*messages, *self.answer(self.graph.extend(call), [ids], call.tools))

    def check(self) -> None:
        """The invariant."""
        assert all(not node.text or node.text == self.renderer.decode(node.tokens()) for node in self.graph.nodes)
        paths = Counter((*node.tokens().tolist(),) for node in self.graph.nodes)
        assert paths == Counter((*prompt, *reply.tokens.tolist()) for prompt, reply in self.served)
        branches = self.graph.branches()
        whole = [branch.tokens.tolist() for branch in branches]
        for prompt, reply in self.served:
            told = [*prompt, *reply.tokens.tolist()]
            assert any(each[: len(told)] == told for each in whole)
        sampled = {
            float(logprob): (int(token), int(version))
            for _, reply in self.served
            for token, logprob, version in zip(reply.tokens, reply.logprobs, reply.versions, strict=True)
        }
        filtered = {float(each) for _, reply in self.served if reply.kept is not None for each in reply.logprobs}
        trained = []
        for branch in branches:
            mask = branch.loss_mask != 0
            sizes = np.zeros(len(mask)) if branch.kept is None else branch.kept.sizes
            assert sizes.tolist() == [2 * (float(logprob) in filtered) for logprob in branch.logprobs]
            assert branch.kept is None or branch.kept.fault(branch.tokens, self.renderer.tokenizer.vocab_size) == ""
            assert not branch.logprobs[~mask].any()
            columns = (branch.logprobs[mask], branch.tokens[mask], branch.versions[mask])
            trained += [(float(one), int(token), int(version)) for one, token, version in zip(*columns, strict=True)]
        assert Counter(trained) == Counter((logprob, *what) for logprob, what in sampled.items())


@pytest.fixture
def engine(renderer: TemplateRenderer) -> Engine:
    return Engine(renderer, EpisodeGraph(renderer))


def user(text: str) -> Message:
    return Message("user", text)


# Where a call goes on, and why one forks


def test_a_conversation_is_one_branch(engine: Engine) -> None:
    history = engine.call([Message("system", "Be brief."), user("1?")])
    history = engine.call([*history, user("2?")])
    engine.call([*history, user("3?")])
    engine.check()
    (branch,) = engine.graph.branches()
    assert engine.graph.forks == {}
    assert engine.renderer.tokenizer.decode(branch.tokens[branch.loss_mask != 0], skip_special=False) == "Yes.<|im_end|>" * 3
    assert branch.finish_reason == "stop" and branch.sampled == len(engine.served[0][0])
    # What was given has the version of what was sampled next.
    expected: list[int] = []
    for node in engine.graph.nodes:
        expected += [node.reply.versions[0]] * len(node.given) + node.reply.versions.tolist()
    assert branch.versions.tolist() == expected and len(set(expected)) > 2


def test_what_clients_change_on_the_way_is_the_same_conversation(engine: Engine) -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a":1, "b":[2]}}</tool_call>'
    *asked, reply = engine.call([user("1 + 2?")], f" Let me.\n{call}", tools=TOOLS)
    (made,) = reply.tool_calls
    sent = replace(reply, content="Let me.", tool_calls=(replace(made, arguments='{"b": [2],\n"a": 1}'),), reasoning="lost")
    engine.call([*asked, sent, Message("tool", "3", tool_call_id=made.id)], tools=TOOLS)
    assert engine.graph.forks == {}
    engine.check()


def test_a_turn_decodes_its_own_tokens(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    decode = engine.renderer.decode

    def counted(tokens: Any, last: Any = ()) -> str:
        decoded.append(len(tokens))
        return decode(tokens, last)

    monkeypatch.setattr(engine.renderer, "decode", counted)
    history = engine.call([Message("system", "Be brief. " * 50), user("1?")])
    for turn in range(3):
        history = engine.call([*history, user(f"{turn}?")])
    assert engine.graph.forks == {}
    first, *others = engine.graph.nodes
    assert decoded == [len(first.tokens()), *(len(node.given) + len(node.reply.tokens) for node in others[:-1])]
    engine.check()


@pytest.mark.parametrize(
    ("decoder", "parts"), [({"type": "WordPiece", "prefix": "##", "cleanup": False}, False), ({"type": "Fuse"}, True)]
)
def test_where_parts_have_another_text_than_the_whole_all_of_it_is_decoded(
    tmp_path: Path, decoder: dict[str, Any], parts: bool
) -> None:
    folder = cases.folder_of(tmp_path, cases.HERMES, eos_token_id=END)
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "decoder": decoder}))  # WordPiece: spaces between tokens
    renderer = TemplateRenderer(Tokenizer(str(folder)))
    engine = Engine(renderer, EpisodeGraph(renderer))
    history = engine.call([user("1?")])
    for turn in range(2):
        history = engine.call([*history, user(f"{turn}?")])
    assert renderer.decodes_parts == parts
    assert engine.graph.nodes[1].text == renderer.decode(engine.graph.nodes[1].tokens())
    engine.check()


@pytest.mark.parametrize(
    "change",
    [{"content": "Let us."}, {"tool_calls": ()}, {"tool_calls": (ToolCall("other", "add", "{}"),)}, {"name": "somebody"}],
)
def test_what_they_make_of_a_reply_is_another_conversation(engine: Engine, change: dict[str, Any]) -> None:
    *asked, reply = engine.call(
        [user("1 + 2?")], 'Let me.\n<tool_call>{"name": "add", "arguments": {}}</tool_call>', tools=TOOLS
    )
    engine.call([*asked, replace(reply, **change), user("And?")], tools=TOOLS)
    assert engine.graph.forks == {"history edited": 1}
    engine.check()


def forked(engine: Engine, messages: Sequence[Message], **fields: Any) -> str:
    fork = engine.graph.extend(PolicyCall(messages=tuple(messages), **fields)).fork
    engine.call(messages, f"Reply {len(engine.served)}", **fields)
    engine.check()
    return fork


def test_forks_have_their_reasons(engine: Engine) -> None:
    first = engine.call([user("1?")])
    second = engine.call([*first, user("2?")])
    assert forked(engine, [*first, user("Not 2?")]) == "two calls from one message"
    assert forked(engine, [user("1?")]) == "two calls from one message"
    assert forked(engine, [user("Another?")]) == "new conversation"
    assert forked(engine, [user("0?"), *second[1:], user("3?")]) == "new conversation"  # nothing of it is known
    assert forked(engine, [*second[:3], Message("assistant", "No."), user("3?")]) == "history edited: message 3"
    assert forked(engine, [*second[:2], user("Not 2?"), Message("assistant", "No."), user("3?")]) == "history edited: message 3"
    assert forked(engine, [*second, user("3?")], tools=TOOLS) == "tools changed"
    assert engine.graph.forks == {
        "two calls from one message": 2,
        "new conversation": 2,
        "history edited": 2,
        "tools changed": 1,
    }


def test_what_the_client_says_in_the_model_s_name_is_given(engine: Engine) -> None:
    history = engine.call([user("1?")])
    extension = engine.graph.extend(PolicyCall(messages=(*history, Message("assistant", "Mine."), user("2?"))))
    assert extension.parent is engine.graph.nodes[0] and extension.fork == ""
    assert "<|assistant|>Mine.<|im_end|>" in engine.renderer.tokenizer.decode(extension.given, skip_special=False)


def test_where_the_template_proves_nothing_the_prompt_is_rendered_anew(renderer: TemplateRenderer, tmp_path: Path) -> None:
    forgetful = TemplateRenderer(cases.tokenizer_of(tmp_path, cases.FORGETFUL))
    engine = Engine(forgetful, EpisodeGraph(forgetful))
    history = engine.call([user("1?")])
    extension = engine.graph.extend(PolicyCall(messages=(*history, user("2?"))))
    assert extension.fork == "not a prefix: the template renders messages differently if more messages follow"
    assert extension.prompt.tolist() == forgetful.render([*history, user("2?")], ())
    engine.call([*history, user("2?")])
    engine.check()
    assert engine.graph.forks == {"not a prefix": 1}


def test_what_was_reasoned_stays_in_the_history(tmp_path: Path) -> None:
    thinking = TemplateRenderer(Tokenizer(str(cases.qwen3(tmp_path))))
    engine = Engine(thinking, EpisodeGraph(thinking))
    call = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    history: tuple[Message, ...] = (user("1 + 2?"),)
    for text in ("First.", "Then."):
        *asked, reply = engine.call(history, f"<think>\n{text}\n</think>\n\n{call}", tools=TOOLS)
        assert reply.reasoning == text
        history = (*asked, replace(reply, reasoning=""), Message("tool", "3", tool_call_id=reply.tool_calls[0].id))
    extension = engine.graph.extend(PolicyCall(messages=history, tools=TOOLS))
    assert [message.reasoning for message in extension.conversation] == ["", "First.", "", "Then.", ""]
    assert extension.prompt.tolist() == thinking.render(extension.conversation, TOOLS)


def test_a_reply_without_tokens_is_no_node_and_one_that_was_cut_off_is_told(engine: Engine) -> None:
    extension = engine.graph.extend(PolicyCall(messages=(user("1?"),)))
    nothing = PolicyReply(Message("assistant"), np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int64), "length")
    engine.graph.add(extension, "none", [nothing])
    assert engine.graph.nodes == engine.graph.branches() == []
    engine.graph.reward("none", 1.0)
    engine.answer(engine.graph.extend(PolicyCall(messages=(user("1?"),))), [[65, 66]])
    assert [branch.finish_reason for branch in engine.graph.branches()] == ["length"]


def test_several_replies_are_siblings_and_no_fork(engine: Engine) -> None:
    asked = (user("1?"),)
    ids = [[*engine.renderer.encode(text), END] for text in ("a", "b", "b")]
    replies = engine.answer(engine.graph.extend(PolicyCall(messages=asked, n=3)), ids)
    for reply in replies:  # two are alike: each goes on once
        engine.call([*asked, reply, user("2?")])
    assert engine.graph.forks == {} and len(engine.graph.branches()) == 3
    engine.check()


def test_calls_that_are_extended_at_once_fork(engine: Engine) -> None:
    first = [engine.graph.extend(PolicyCall(messages=(user(text),))) for text in ("1?", "2?")]
    assert [extension.fork for extension in first] == ["", ""]
    (one,), (_other,) = (engine.answer(extension, [[65, END]]) for extension in first)
    both = [engine.graph.extend(PolicyCall(messages=(user("1?"), one, user(text)))) for text in ("3?", "4?")]
    for extension in both:
        engine.answer(extension, [[66, END]])
    assert engine.graph.forks == {"new conversation": 1, "two calls from one message": 1}
    engine.check()


def test_tokens_go_on_behind_the_deepest_path_that_they_begin_with(engine: Engine) -> None:
    def extend(tokens: Sequence[int]) -> Any:
        return engine.graph.extend(PolicyCall(tokens=tuple(tokens)))

    engine.answer(extend([1, 2]), [[3, 4, END]])
    (node,) = engine.graph.nodes
    further = extend([1, 2, 3, 4, END, 5])
    assert (further.parent, further.given.tolist(), further.fork) == (node, [5], "")
    engine.answer(further, [[6, 7]])
    again = extend([1, 2, 3, 4, END, 5, 6, 7])  # what was cut off goes on
    assert (again.parent, again.given.tolist(), again.fork) == (engine.graph.nodes[1], [], "")
    engine.answer(again, [[8, END]])
    for tokens, parent, fork in (
        ([1, 2, 3, 4, END, 9], node, "two calls from one message"),
        ([1, 2, 3, 4, END, 5, 6, 9], node, "history edited: token 7"),
        ([1, 2, 3, 9], None, "history edited: token 3"),
        ([1, 2], None, "two calls from one message"),
        ([1, 9], None, "new conversation"),
    ):
        found = extend(tokens)
        assert (found.parent, found.fork, found.prompt.tolist()) == (parent, fork, tokens)
        engine.answer(found, [[END]])
    engine.check()


def test_text_is_encoded_and_goes_on_as_tokens_do(engine: Engine) -> None:
    engine.answer(engine.graph.extend(PolicyCall(text="Once")), [engine.renderer.encode(" upon")])
    further = engine.graph.extend(PolicyCall(text="Once upon a"))
    assert further.parent is engine.graph.nodes[0] and further.given.tolist() == engine.renderer.encode(" a")


def test_a_forced_beginning_is_given_and_not_trained(engine: Engine) -> None:
    call = PolicyCall(messages=(user("1 + 2?"),), tools=TOOLS, tool_choice="function:add")
    extension = engine.graph.extend(call)
    assert extension.prompt.tolist() == [*engine.renderer.render(call.messages, TOOLS), *extension.forced]
    rest = [*engine.renderer.encode(' {"a": 1}}\n</tool_call>'), END]
    (message,) = engine.answer(extension, [rest], TOOLS)
    assert [(made.name, made.arguments) for made in message.tool_calls] == [("add", '{"a": 1}')]
    engine.call([*call.messages, message, Message("tool", "3", tool_call_id=message.tool_calls[0].id)], tools=TOOLS)
    assert engine.graph.forks == {}
    engine.check()


def test_an_episode_holds_no_more_than_it_may(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    history = engine.call([user("1?")])
    monkeypatch.setattr(product, "MOST_HELD", engine.graph.held + 1)
    history = engine.call([*history, user("2?")])
    with pytest.raises(Refused, match="are allowed") as refused:
        engine.graph.extend(PolicyCall(messages=(*history, user("3?"))))
    assert refused.value.code == TOO_LONG
    engine.check()


def test_extending_changes_nothing(engine: Engine) -> None:
    history = engine.call([user("1?")])
    for messages in ([*history, user("2?")], [user("1?")], [user("3?")]):
        before = len(engine.graph.nodes), dict(engine.graph.forks)
        engine.graph.extend(PolicyCall(messages=tuple(messages)))
        assert (len(engine.graph.nodes), dict(engine.graph.forks)) == before


# Rewards and payloads


def test_a_turn_s_reward_is_at_its_last_token_where_it_is_trained(engine: Engine) -> None:
    first = engine.call([user("1?")])
    engine.call([*first, user("2?")])
    engine.call([*first, user("3?")])
    engine.graph.reward("completion-0", 1.0)
    engine.graph.reward("completion-0", 0.5)  # replaces
    engine.graph.reward("completion-2", -1.0)
    one, other = engine.graph.branches()
    assert one.rewards == {len(engine.served[0][0]) + len(engine.served[0][1].tokens) - 1: 0.5}
    assert other.rewards == {len(other.tokens) - 1: -1.0}
    with pytest.raises(Refused, match="'completion-9' is not a completion of this episode") as refused:
        engine.graph.reward("completion-9", 1.0)
    assert refused.value.status == 404


def test_a_payload_has_a_row_for_each_branch(renderer: TemplateRenderer) -> None:
    engines = [Engine(renderer, EpisodeGraph(renderer)) for _ in range(3)]
    for engine in engines[:2]:
        history = engine.call([user("1?")], "No.")
        engine.call([*history, user("2?")])
    engines[0].call([*history, user("3?")])
    engines[1].graph.reward("completion-1", 2.0)
    task = np.array(renderer.render([user("1?")], ()), np.int32)
    payload, versions = payload_of(7, [engine.graph for engine in engines], task)
    payload = types.decode(GroupPayload, types.encode(payload))
    payload.check(renderer.tokenizer.vocab_size)
    assert payload.rows.tolist() == [2, 1, 1] and payload.n == 3
    assert payload.prompt.tolist() == task[:-1].tolist()  # the idle episode has the last token as its row
    rows = [np.concatenate([payload.prompt, sample.tokens]).tolist() for sample in payload.samples]
    branches = [branch for engine in engines[:2] for branch in engine.graph.branches()]
    assert rows == [*(branch.tokens.tolist() for branch in branches), task.tolist()]
    for sample, branch in zip(payload.samples, branches, strict=False):
        for name in ("loss_mask", "logprobs", "versions"):
            assert np.array_equal(getattr(sample, name), getattr(branch, name)[len(payload.prompt) :])
    idle = payload.samples[-1]
    assert (idle.loss_mask.tolist(), idle.finish_reason) == ([0], "abort")
    (turn,) = payload.turn_rewards
    assert (turn.row, turn.token, turn.value) == (2, int(payload.lengths[2]) - 1, 2.0)
    trained = np.concatenate([sample.versions[sample.loss_mask != 0] for sample in payload.samples])
    assert versions == (PolicyVersion.unpack(trained.min()), PolicyVersion.unpack(trained.max()))


def test_the_common_prompt_ends_before_what_the_model_wrote(renderer: TemplateRenderer) -> None:
    engines = [Engine(renderer, EpisodeGraph(renderer)) for _ in range(2)]
    for engine in engines:
        engine.call([user("1?")])
    payload, _ = payload_of(1, [engine.graph for engine in engines], np.zeros(0, np.int32))
    assert payload.prompt.tolist() == engines[0].served[0][0]
    assert all(sample.loss_mask.all() for sample in payload.samples)


def test_episodes_without_a_call_have_a_row(renderer: TemplateRenderer) -> None:
    for task in (np.array([1, 2, 3], np.int32), np.zeros(0, np.int32)):
        payload, versions = payload_of(1, [EpisodeGraph(renderer) for _ in range(2)], task)
        payload.check(8)
        assert versions is None and payload.rows.tolist() == [1, 1] and not payload.columns().loss_mask.any()


# Random histories


class Turn(NamedTuple):
    """One thing that a client does, with the numbers that say how."""

    do: str
    which: int
    text: str
    replies: list[tuple[str, str, int, bytes]]  # kind, text, where it is cut off, raw tokens


WORDS = st.text(st.sampled_from('ab 1\n{}"<é€🙂\u0301\ufffd'), max_size=6)
REPLIES = st.tuples(
    st.sampled_from(["text", "call", "calls", "cut", "bytes", "other end"]),
    WORDS,
    st.integers(0, 60),
    st.binary(min_size=1, max_size=5),
)
ACTIONS = ["go on", "go on", "go on", "retry", "edit", "compact", "at once", "tools", "tokens", "force", "say", "same"]
TURNS = st.lists(
    st.builds(
        Turn, st.sampled_from(ACTIONS), st.sampled_from([0, 0, 0, 1, 2, 5]), WORDS, st.lists(REPLIES, min_size=1, max_size=2)
    ),
    min_size=1,
    max_size=9,
)


class Client:
    """An agent that rewrites what it was told: reasoning is dropped, JSON is written anew, replies are trimmed."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.histories: list[tuple[Message, ...]] = [(Message("system", "Be brief."),)]
        self.calls: list[PolicyCall] = []
        self.asked = 0  # calls that the engine answered

    def take(self, turn: Turn) -> None:
        history = self.histories[-1 - turn.which % len(self.histories)]
        tools = FEWER if turn.do == "tools" else TOOLS
        call = PolicyCall(messages=(*history, *self._asked(history, turn)), tools=tools, n=len(turn.replies))
        if turn.do == "retry" and self.calls:
            call = self.calls[turn.which % len(self.calls)]
        elif turn.do == "edit":
            at = turn.which % len(call.messages)
            edited = replace(call.messages[at], content=call.messages[at].content + "!")
            call = replace(call, messages=(*call.messages[:at], edited, *call.messages[at + 1 :]))
        elif turn.do == "compact":
            call = replace(call, messages=(history[0], user(f"So far: {turn.text}")))
        elif turn.do == "say":
            call = replace(call, messages=(*call.messages, Message("assistant", turn.text), user("Well?")))
        elif turn.do == "force":
            call = replace(call, tool_choice=["required", "function:add"][turn.which % 2])
        elif turn.do == "tokens" and self.engine.served:
            prompt, reply = self.engine.served[turn.which % len(self.engine.served)]
            whole = [*prompt, *reply.tokens.tolist(), *turn.text.encode()]
            call = replace(call, messages=(), tokens=tuple(whole[: len(whole) - turn.which]), tools=())
        self.calls.append(call)
        extensions = [self.engine.graph.extend(call) for _ in range(2 if turn.do == "at once" else 1)]
        for extension in extensions:
            self.asked += 1
            ids = turn.replies if turn.do != "same" else turn.replies[:1] * 2
            for reply in self.engine.answer(extension, [self._ids(*each) for each in ids], call.tools):
                if call.messages:
                    self.histories.append((*call.messages, self._sent(reply)))

    def _asked(self, history: Sequence[Message], turn: Turn) -> list[Message]:
        made = history[-1].tool_calls
        return [Message("tool", turn.text, tool_call_id=call.id) for call in made] or [user(turn.text)]

    def _ids(self, kind: str, text: str, cut: int, raw: bytes) -> list[int]:
        calls = 2 if kind == "calls" else 1
        body = json.dumps({"name": "add", "arguments": {"a": text}}, ensure_ascii=False, separators=(",", ":"))
        ids = self.engine.renderer.encode(text if kind == "text" else text + f"<tool_call>{body}</tool_call>" * calls)
        if kind == "bytes":
            ids = [*raw, cases.special("<|user|>"), *raw]
        elif kind == "cut":
            return ids[: cut + 1]
        return [*ids, OTHER_END if kind == "other end" else END]

    def _sent(self, reply: Message) -> Message:
        calls = tuple(
            replace(call, arguments=json.dumps(json.loads(call.arguments), indent=1, sort_keys=True))
            for call in reply.tool_calls
        )
        return replace(reply, content=reply.content.strip(), tool_calls=calls, reasoning="")


def try_histories(renderer: TemplateRenderer, graph: Any, examples: int) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(TURNS)
    def run(turns: list[Turn]) -> None:
        client = Client(Engine(renderer, graph(renderer)))
        for turn in turns:
            client.take(turn)
        client.engine.check()
        episode = client.engine.graph
        siblings = len(client.engine.served) - client.asked
        assert len(episode.branches()) <= 1 + episode.forks.total() + siblings  # no fork is silent
        payload, versions = product.payload_of(1, [episode], np.zeros(0, np.int32))
        assert versions is not None
        payload.check(renderer.tokenizer.vocab_size)
        rows = [np.concatenate([payload.prompt, sample.tokens]).tolist() for sample in payload.samples]
        assert rows == [branch.tokens.tolist() for branch in episode.branches()]

    run()


def test_whatever_a_client_does_the_tokens_are_those_of_the_engine(renderer: TemplateRenderer) -> None:
    try_histories(renderer, EpisodeGraph, 100)


def test_whatever_a_client_does_where_thoughts_are_left_out(tmp_path: Path) -> None:
    try_histories(TemplateRenderer(Tokenizer(str(cases.qwen3(tmp_path)))), EpisodeGraph, 40)


def test_columns_that_do_not_fit_are_refused(engine: Engine) -> None:
    reply = PolicyReply(Message("assistant"), np.zeros(2, np.int32), np.zeros(1, np.float32), np.zeros(2, np.int64), "stop")
    engine.graph.add(engine.graph.extend(PolicyCall(messages=(user("1?"),))), "c", [reply])
    with pytest.raises(InvalidMessage):
        payload_of(1, [engine.graph], np.zeros(0, np.int32))
