"""Who plays a gateway's tasks: retries by kind of failure, late episodes by policy, and what is told of each."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import Any

import pytest

from runtime.config import Budgets, Config, Deadlines, Environment, Run, Services
from runtime.environments import messages
from runtime.environments.messages import EnvironmentDescription, EpisodeEnd, EpisodeEvent, EpisodeRequest
from runtime.errors import ServiceFault, Unreachable
from runtime.gateway.conversation import Message, Refused
from runtime.gateway.episodes import Episodes
from runtime.gateway.players import EpisodeRunner
from runtime.gateway.rendering import TemplateRenderer
from runtime.process import spans
from runtime.process.spans import TracedSpan
from runtime.types import EpisodeTask, GeneratedGroup, RunEpisodesRequest, SamplingParams
from sluice.agents import episode
from tests.unit.actor_desk import settle
from tests.unit.template_cases import episodes_of, tiny_renderer
from tests.unit.test_episodes import ScriptedPolicy, call

PATIENCE = 60.0
INFRASTRUCTURE = EpisodeEnd(failure="infrastructure", reason="the database is down")


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> TemplateRenderer:
    return tiny_renderer(tmp_path_factory.mktemp("model"))


Act = Callable[["ScriptedEnvironment", EpisodeRequest], AsyncGenerator[EpisodeEvent, None]]


class ScriptedEnvironment:
    """Plays as `act` does."""

    def __init__(self, name: str, act: Act):
        self.name, self.act = name, act
        self.asked: list[EpisodeRequest] = []
        self.cancelled: dict[str, asyncio.Event] = {}
        self.left: list[str] = []
        self.began = asyncio.Event()
        self.answers: asyncio.Event | None = None  # again, after it was lost

    async def run(self, request: EpisodeRequest) -> AsyncGenerator[EpisodeEvent, None]:
        self.asked.append(request)
        self.cancelled[request.id] = asyncio.Event()
        try:
            async for event in self.act(self, request):
                yield event
        finally:
            self.left.append(request.id)

    async def cancel(self, episode: str) -> None:
        self.cancelled[episode].set()

    async def describe(self, seconds: float) -> EnvironmentDescription:
        if self.answers is None:
            raise Unreachable(self.name, "Describe", "nobody listens there")
        await self.answers.wait()
        return EnvironmentDescription()


def ending(*ends: EpisodeEnd, events: tuple[EpisodeEvent, ...] = ()) -> Act:
    """Each episode with the next of these ends; the last one again and again."""
    left = list(ends)

    async def act(environment: ScriptedEnvironment, request: EpisodeRequest) -> AsyncGenerator[EpisodeEvent, None]:
        yield EpisodeEvent(phase="run")
        for event in events:
            yield event
        yield EpisodeEvent(end=left.pop(0) if len(left) > 1 else left[0])

    return act


async def hanging(environment: ScriptedEnvironment, request: EpisodeRequest) -> AsyncGenerator[EpisodeEvent, None]:
    """Until it is told to end; then it says what it earned so far."""
    yield EpisodeEvent(phase="run")
    environment.began.set()
    await environment.cancelled[request.id].wait()
    yield EpisodeEvent(end=EpisodeEnd(reward=0.25, stop_reason="timeout"))


class Played:
    def __init__(self, episodes: Episodes, players: EpisodeRunner, policy: ScriptedPolicy):
        self.episodes, self.players, self.policy = episodes, players, policy

    def group(self, n: int = 2, group_id: int = 7) -> Awaitable[GeneratedGroup]:
        task = EpisodeTask(
            messages=[{"role": "user", "content": "hello"}],
            label="5",
            source="test/train",
            extra={"row": 3},
            environment="game",
        )
        request = RunEpisodesRequest(group_id=group_id, task=task, n=n, seed=3, sampling=SamplingParams(max_new_tokens=8))
        return asyncio.ensure_future(self.episodes.play(request))


def play(
    renderer: TemplateRenderer,
    ports: list[ScriptedEnvironment],
    scenario: Callable[[Played], Awaitable[Any]],
    rewarded: bool = False,
    seconds: float = PATIENCE,
    malformed_reward: float | None = None,
    **settings: Any,
) -> Any:
    async def whole() -> Any:
        policy = ScriptedPolicy(renderer)
        episodes = episodes_of(renderer, policy, rewarded=rewarded, malformed_reward=malformed_reward)
        config = Config(
            run=Run(name="m"),
            services=Services(environment={"game": Environment(run="a.py:b", **settings)}),
            deadlines=Deadlines(start=0.05, episode=seconds),
        )
        players = EpisodeRunner(config, "http://gateway", episodes)
        players.use({"game": ports} if ports else {})
        episodes.players = players.play
        return await scenario(Played(episodes, players, policy))

    return asyncio.run(asyncio.wait_for(whole(), PATIENCE))


def generated(renderer: TemplateRenderer, *ports: ScriptedEnvironment, n: int = 2, **settings: Any) -> GeneratedGroup:
    async def scenario(played: Played) -> GeneratedGroup:
        group = await played.group(n)
        assert not played.episodes.open and not played.players._attempts  # nothing is left of it
        return group

    found: GeneratedGroup = play(renderer, list(ports), scenario, **settings)
    return found


def acted(
    renderer: TemplateRenderer, act: Callable[..., AsyncGenerator[EpisodeEvent, None]], n: int = 1, **settings: Any
) -> GeneratedGroup:
    """As `generated`, by one environment whose act knows the gateway, too."""

    async def scenario(played: Played) -> GeneratedGroup:
        played.players.use({"game": [ScriptedEnvironment("environment-0", partial(act, played))]})
        return await played.group(n)

    found: GeneratedGroup = play(renderer, [], scenario, **settings)
    return found


def reasons(group: GeneratedGroup) -> list[str]:
    assert group.outcomes is not None
    return group.outcomes.reasons


def test_agents_know_the_stop_reasons_that_gateways_take() -> None:
    """Two lists, as neither of the two may import the other."""
    assert episode.STOP_REASONS == messages.STOP_REASONS


def test_an_agent_is_told_its_task_whole_and_its_seed_is_its_own(renderer: TemplateRenderer) -> None:
    port = ScriptedEnvironment("environment-0", ending(EpisodeEnd(reward=1.0)))
    group = generated(renderer, port)
    assert group.rewards == [1.0, 1.0]
    assert reasons(group) == ["completed", "completed"]
    task = {"messages": [{"role": "user", "content": "hello"}], "label": "5", "source": "test/train", "row": 3}
    assert [json.loads(asked.task) for asked in port.asked] == [task, task]
    assert len({asked.seed for asked in port.asked}) == 2
    assert all(asked.base_url == f"http://gateway/episodes/{asked.id}" for asked in port.asked)
    assert port.asked[0].purpose == "train"


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_what_fails_again_and_again_is_left_out_and_says_why(renderer: TemplateRenderer, retries: int) -> None:
    port = ScriptedEnvironment("environment-0", ending(INFRASTRUCTURE))
    group = generated(renderer, port, n=1, retries=retries)
    assert len(port.asked) == retries + 1
    assert math.isnan(group.rewards[0])
    assert reasons(group) == ["left out: infrastructure: the database is down"]


def test_a_bad_task_is_not_tried_again(renderer: TemplateRenderer, caplog: pytest.LogCaptureFixture) -> None:
    port = ScriptedEnvironment("environment-0", ending(EpisodeEnd(failure="data", reason="no answer in the row")))
    group = generated(renderer, port, n=1)
    assert len(port.asked) == 1
    assert reasons(group) == ["left out: data: no answer in the row"]
    assert "a bad task of test/train (group 7): no answer in the row" in caplog.text


def test_an_agent_that_fails_earns_its_reward(renderer: TemplateRenderer) -> None:
    port = ScriptedEnvironment("environment-0", ending(EpisodeEnd(stop_reason="max_turns"), EpisodeEnd(reward=0.5)))
    group = generated(renderer, port)
    assert sorted(group.rewards) == [0.0, 0.5]
    assert sorted(reasons(group)) == ["completed", "max_turns"]


def test_too_many_failures_in_a_row_end_the_run_and_name_the_cause(renderer: TemplateRenderer) -> None:
    port = ScriptedEnvironment("environment-0", ending(INFRASTRUCTURE))
    with pytest.raises(ServiceFault, match=r"services\.environment\.game: play: 5 failures in a row .*the database is down"):
        generated(renderer, port, n=8, failures_in_a_row=5)


def test_an_episode_that_ended_well_lies_between_failures(renderer: TemplateRenderer) -> None:
    port = ScriptedEnvironment("environment-0", ending(*[INFRASTRUCTURE, EpisodeEnd(reward=1.0)] * 4))
    group = generated(renderer, port, n=4, failures_in_a_row=5, retries=8)
    assert group.rewards == [1.0] * 4


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (EpisodeEvent(reward=math.nan), "not a finite number"),
        (EpisodeEvent(reward=1.0, completion_id="call-99"), "'call-99' is not a completion of this episode"),
        (EpisodeEvent(reward=1.0, turn=3), "'turn 3' is not a completion of this episode"),
        (EpisodeEvent(reward=1.0, branch="critic"), "'of branch critic' is none"),
        (EpisodeEvent(log={"a b": 1.0}), "not a valid name of a figure"),
        (EpisodeEvent(end=EpisodeEnd(rewards={"call-99": 1.0})), "'call-99' is not a completion of this episode"),
        (EpisodeEvent(end=EpisodeEnd(stop_reason="bored")), "'bored' is not one of completed"),
    ],
)
def test_what_an_agent_may_not_tell_is_a_failure(renderer: TemplateRenderer, event: EpisodeEvent, reason: str) -> None:
    port = ScriptedEnvironment("environment-0", ending(EpisodeEnd(reward=1.0), events=(event,)))
    group = generated(renderer, port, n=1, retries=0)
    (told,) = reasons(group)
    assert told.startswith("left out: infrastructure: ")
    assert reason[:20] in told


def test_rewards_of_turns_branches_and_figures_arrive(renderer: TemplateRenderer) -> None:
    async def act(played: Played, port: ScriptedEnvironment, request: EpisodeRequest) -> AsyncGenerator[EpisodeEvent, None]:
        yield EpisodeEvent(phase="run")
        await played.episodes.call(played.episodes.episode(request.id, request.api_key), call())
        yield EpisodeEvent(reward=0.5, turn=0)
        yield EpisodeEvent(log={"moves": 3.0})
        yield EpisodeEvent(log={"moves": 5.0})
        yield EpisodeEvent(end=EpisodeEnd(reward=2.0))

    group = acted(renderer, act, 2)
    assert group.rewards == [2.0, 2.0]
    assert group.outcomes is not None
    assert (group.outcomes.turns, group.outcomes.log) == ([1, 1], {"moves": (2, 10.0)})


@pytest.mark.parametrize("reward", [None, -1.0])
@pytest.mark.parametrize("end", [EpisodeEnd(reward=2.0), INFRASTRUCTURE])
def test_a_malformed_call_is_counted_and_ends_the_episode_if_the_run_says_so(
    renderer: TemplateRenderer, reward: float | None, end: EpisodeEnd
) -> None:
    refused = list[int]()

    async def act(played: Played, port: ScriptedEnvironment, request: EpisodeRequest) -> AsyncGenerator[EpisodeEvent, None]:
        yield EpisodeEvent(phase="run")
        played.policy.malformed = True
        episode = played.episodes.episode(request.id, request.api_key)
        await played.episodes.call(episode, call())
        try:
            await played.episodes.call(episode, call(Message("user", "go on")))
        except Refused as error:
            refused.append(error.status)
        yield EpisodeEvent(end=end)

    group = acted(renderer, act, malformed_reward=reward, retries=0)
    assert group.outcomes is not None
    if reward is not None:
        assert (group.rewards, reasons(group), group.outcomes.malformed, refused) == ([-1.0], ["parse_error"], [1], [404])
    else:
        assert (group.outcomes.malformed, refused) == ([2], [])
        assert reasons(group)[0] == ("completed" if end.reward else "left out: infrastructure: the database is down")


def test_the_phases_and_the_calls_of_an_episode_are_spans(renderer: TemplateRenderer, told: list[TracedSpan]) -> None:
    """The second try of what fails first; a phase that is none is told of nowhere."""

    async def act(played: Played, port: ScriptedEnvironment, request: EpisodeRequest) -> AsyncGenerator[EpisodeEvent, None]:
        yield EpisodeEvent(phase="setup")
        yield EpisodeEvent(phase="dancing")
        yield EpisodeEvent(phase="run")
        episode = played.episodes.episode(request.id, request.api_key)
        episode.rollout = "rollout-3"
        await played.episodes.call(episode, call())
        yield EpisodeEvent(phase="score")
        yield EpisodeEvent(end=EpisodeEnd(failure="" if len(port.asked) > 1 else "infrastructure", reward=1.0))

    acted(renderer, act)
    found = sorted(told, key=lambda span: span.start)
    phase = "0 environment game"
    assert [(span.name, span.detail) for span in found] == 2 * [
        *(("setup", phase), ("run", phase), (spans.POLICY, "0 rollout-3"), ("score", phase))
    ]
    assert {(span.line, span.group) for span in found} == {(spans.EPISODES, 7)}
    setup, run, policy, score = found[:4]
    assert setup.end == run.start <= policy.start <= policy.end <= run.end == score.start


def test_an_episode_whose_player_tells_of_no_phase_runs_from_its_first_call_on(
    renderer: TemplateRenderer, told: list[TracedSpan]
) -> None:
    async def act(played: Played, port: ScriptedEnvironment, request: EpisodeRequest) -> AsyncGenerator[EpisodeEvent, None]:
        await played.episodes.call(played.episodes.episode(request.id, request.api_key), call())
        yield EpisodeEvent(end=EpisodeEnd(reward=1.0))

    acted(renderer, act)
    assert [span.name for span in told] == [spans.POLICY, "run"]


def test_a_call_has_its_own_time(renderer: TemplateRenderer) -> None:
    async def act(played: Played, port: ScriptedEnvironment, request: EpisodeRequest) -> AsyncGenerator[EpisodeEvent, None]:
        yield EpisodeEvent(phase="run")
        played.policy.gate.clear()
        with pytest.raises(Refused, match=r"no answer within 0\.02 s \(budgets\.call\)") as refused:
            await played.episodes.call(played.episodes.episode(request.id, request.api_key), call())
        assert refused.value.status == 408
        yield EpisodeEvent(end=EpisodeEnd(reward=0.5))

    assert acted(renderer, act, budgets=Budgets(call=0.02)).rewards == [0.5]


async def lost(port: ScriptedEnvironment, request: EpisodeRequest) -> AsyncGenerator[EpisodeEvent, None]:
    yield EpisodeEvent(phase="run")
    raise Unreachable(port.name, "Run", "the connection is lost")


@pytest.mark.parametrize(
    ("act", "why"), [(ending(INFRASTRUCTURE), "the database is down"), (lost, "environment-0: the connection is lost")]
)
def test_infrastructure_is_tried_again_elsewhere_from_the_same_seed(renderer: TemplateRenderer, act: Act, why: str) -> None:
    broken = ScriptedEnvironment("environment-0", act)
    whole = ScriptedEnvironment("environment-1", ending(EpisodeEnd(reward=1.0)))
    group = generated(renderer, broken, whole, n=1)
    assert group.rewards == [1.0]
    assert [asked.seed for asked in broken.asked] == [asked.seed for asked in whole.asked]
    assert group.outcomes is not None and group.outcomes.repeated == {why: 1}


def test_a_lost_process_is_one_failure_however_many_it_played_and_nobody_asks_it_before_it_answers(
    renderer: TemplateRenderer,
) -> None:
    gone = asyncio.Event()

    async def act(port: ScriptedEnvironment, request: EpisodeRequest) -> AsyncGenerator[EpisodeEvent, None]:
        yield EpisodeEvent(phase="run")
        if len(port.asked) <= 8:
            await gone.wait()
            raise Unreachable(port.name, "Run", "the connection is lost")
        yield EpisodeEvent(end=EpisodeEnd(reward=1.0))

    async def scenario(played: Played) -> None:
        port.answers = asyncio.Event()
        group = played.group(8)
        await settle()
        assert len(port.asked) == 8
        gone.set()
        await settle()
        assert len(port.asked) == 8 and played.players.counts["failures"] == 1
        port.answers.set()
        assert (await group).rewards == [1.0] * 8

    port = ScriptedEnvironment("a", act)
    play(renderer, [port], scenario, failures_in_a_row=2, retries=1)


def test_another_in_the_place_of_a_lost_process_is_asked_at_once(renderer: TemplateRenderer) -> None:
    async def act(port: ScriptedEnvironment, request: EpisodeRequest) -> AsyncGenerator[EpisodeEvent, None]:
        yield EpisodeEvent(phase="run")
        await gone.wait()
        raise Unreachable(port.name, "Run", "it no longer serves")

    async def scenario(played: Played) -> None:
        group = played.group(4)
        await settle()
        assert len(before.asked) == 4
        played.players.use({"game": [after]})
        gone.set()
        assert (await group).rewards == [1.0] * 4 and not played.players.counts["failures"]

    gone = asyncio.Event()
    before, after = ScriptedEnvironment("a", act), ScriptedEnvironment("a", ending(EpisodeEnd(reward=1.0)))
    play(renderer, [before], scenario, retries=1)


@pytest.mark.parametrize("ports", [[ScriptedEnvironment("a", lost)], []], ids=["lost and silent", "none"])
def test_where_no_process_of_the_environment_answers_the_run_ends(
    renderer: TemplateRenderer, ports: list[ScriptedEnvironment]
) -> None:
    with pytest.raises(ServiceFault, match=r"services\.environment\.game: play: no process of the environment serves"):
        generated(renderer, *ports, n=1)


def test_a_group_has_an_end_whatever_its_policy_is(renderer: TemplateRenderer) -> None:
    async def silent(port: ScriptedEnvironment, request: EpisodeRequest) -> AsyncGenerator[EpisodeEvent, None]:
        yield EpisodeEvent(phase="setup")
        await asyncio.Event().wait()

    ports = [ScriptedEnvironment("a", hanging)]
    group = generated(renderer, *ports, n=1, slow="wait", seconds=0.05)
    assert (group.rewards, reasons(group)) == ([0.0], ["timeout"])
    assert len(ports[0].left) == 1
    group = generated(renderer, ScriptedEnvironment("a", silent), n=1, seconds=0.05)
    assert reasons(group) == ["left out: never begun"]


def test_truncate_ends_it_at_its_deadline_and_scores_what_is_there(renderer: TemplateRenderer) -> None:
    group = generated(renderer, ScriptedEnvironment("a", hanging), budgets=Budgets(episode=0.02))
    assert (group.rewards, reasons(group)) == ([0.25, 0.25], ["timeout", "timeout"])


def test_one_that_has_to_be_killed_at_its_deadline_is_not_played_again(renderer: TemplateRenderer) -> None:
    async def stubborn(port: ScriptedEnvironment, request: EpisodeRequest) -> AsyncGenerator[EpisodeEvent, None]:
        yield EpisodeEvent(phase="run")
        yield EpisodeEvent(reward=0.75)
        await port.cancelled[request.id].wait()
        yield EpisodeEvent(end=INFRASTRUCTURE)

    group = generated(renderer, ScriptedEnvironment("a", stubborn), n=1, budgets=Budgets(episode=0.02))
    assert (group.rewards, reasons(group)) == ([0.75], ["timeout"])


def quick_but_one() -> ScriptedEnvironment:
    """The first episode that it is asked for hangs."""

    async def act(port: ScriptedEnvironment, request: EpisodeRequest) -> AsyncGenerator[EpisodeEvent, None]:
        whose = hanging if request is port.asked[0] else ending(EpisodeEnd(reward=1.0))
        async for event in whose(port, request):
            yield event

    return ScriptedEnvironment("a", act)


@pytest.mark.parametrize(
    ("slow", "retries", "rewards", "told"),
    [
        ("truncate", 2, [0.25, 1.0, 1.0], "timeout"),
        ("shrink", 2, [math.nan, 1.0, 1.0], "left out: slow"),
        ("shrink", 2, [0.25, 1.0], "timeout"),  # with one other alone
        ("retry", 2, [1.0, 1.0, 1.0], "completed"),
        ("retry", 0, [math.nan, 1.0, 1.0], "left out: slow"),
    ],
)
def test_one_that_the_trainer_waits_for_alone_is_dealt_with(
    renderer: TemplateRenderer, slow: str, retries: int, rewards: list[float], told: str
) -> None:
    port = quick_but_one()

    async def scenario(played: Played) -> GeneratedGroup:
        group = asyncio.ensure_future(played.group(len(rewards)))
        await port.began.wait()
        while played.episodes.open > 1:  # noqa: ASYNC110 - no time passes
            await asyncio.sleep(0)
        played.players.finish_group(8)  # another group
        assert not group.done() and not port.cancelled[port.asked[0].id].is_set()
        played.players.finish_group(7)
        return await group

    group = play(renderer, [port], scenario, slow=slow, retries=retries)
    assert group.rewards == pytest.approx(rewards, nan_ok=True)
    assert reasons(group) == [told, *["completed"] * (len(rewards) - 1)]
    assert group.outcomes is not None and sum(group.outcomes.repeated.values()) == (slow == "retry" and retries > 0)


def test_a_group_that_is_withdrawn_takes_its_episodes_along(renderer: TemplateRenderer) -> None:
    port = ScriptedEnvironment("a", hanging)

    async def scenario(played: Played) -> None:
        group = asyncio.ensure_future(played.group(2))
        await port.began.wait()
        group.cancel()
        await asyncio.gather(group, return_exceptions=True)
        assert len(port.left) == len(port.asked) == 2
        assert not played.episodes.open

    play(renderer, [port], scenario)


def test_where_the_run_has_rewards_of_its_own_an_agent_need_not_give_any(renderer: TemplateRenderer) -> None:
    port = ScriptedEnvironment("a", ending(EpisodeEnd()))
    assert generated(renderer, port, rewarded=True).rewards == []
    port = ScriptedEnvironment("a", ending(EpisodeEnd(left_out=True), EpisodeEnd()))
    assert all(map(math.isnan, generated(renderer, port, rewarded=True).rewards))
