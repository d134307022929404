"""A conversation with the policy, as agents hold it. The standard library alone."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from sluice.agents.episode import DataError, Episode, PolicyRefused

Message = dict[str, Any]
Step = Callable[[str], Awaitable[tuple[str, float, bool]]]


class Conversation:
    """`messages`: all messages so far, in the form of OpenAI's API."""

    def __init__(self, episode: Episode, messages: list[Message]):
        self.episode, self.messages = episode, messages

    def append(self, text: str) -> None:
        """Append the user's next message."""
        self.messages.append({"role": "user", "content": text})

    async def reply(self, **fields: Any) -> Message | None:
        """Ask the policy for its next message, and append it. `fields`: of the request. Returns None, and sets the stop reason,
        if the conversation is too long. Raises PolicyRefused if the gateway refuses for another reason."""
        try:
            message = await self.episode.chat(self.messages, **fields)
        except PolicyRefused as error:
            if error.code != "context_length_exceeded":
                raise
            self.episode.stop_reason = "context_overflow"
            return None
        self.messages.append(message)
        return message

    async def play(self, step: Step, turns: int, turn_rewards: bool) -> float | None:
        """Play a game in text, of at most `turns` replies. `step`: from the text of a reply to the next observation, the
        reward, and whether the game is over. It raises ValueError for a text that is no move, which ends the game.

        Returns the sum of the rewards; None with `turn_rewards`, which rewards each turn by itself."""
        total, episode = 0.0, self.episode
        for turn in range(turns):
            if (message := await self.reply()) is None:
                break
            try:
                seen, earned, last = await step(message["content"] or "")
            except ValueError:
                episode.stop_reason = "parse_error"
                break
            total += earned
            if turn_rewards:
                episode.reward(earned, turn)
            if last:
                break
            self.append(seen)
        else:
            episode.stop_reason = "max_turns"
        return None if episode.rewarded else total


def opening(data: Mapping[str, Any], system: str = "") -> list[Message]:
    """Return the messages that a row begins with: its column `messages`, or `prompt`, a text or messages. Raises DataError."""
    found = data.get("messages") or data.get("prompt")
    if isinstance(found, str):
        found = [{"role": "user", "content": found}]
    if not found or not isinstance(found, list):
        raise DataError(f"the row has neither messages nor a prompt; its columns are {', '.join(data) or 'none'}")
    return [*system_messages(system), *found]


def system_messages(system: str) -> list[Message]:
    """Return the system message as a list, which is empty for an empty text."""
    return [{"role": "system", "content": system}] if system else []


RUNNING: set[object] = set()  # calls in threads, also those that no task awaits any more


def _counted(function: Any, *arguments: Any, **given: Any) -> Any:
    RUNNING.add(mark := object())
    try:
        return function(*arguments, **given)
    finally:
        RUNNING.discard(mark)


async def value_of(function: Any, *arguments: Any, **given: Any) -> Any:
    """Return what a function gives, async or not; a plain function runs in a thread. Raises the function's error, and
    RuntimeError in place of SystemExit, which would end all other work."""
    try:
        if any(inspect.iscoroutinefunction(each) for each in (function, type(function).__call__)):
            return await function(*arguments, **given)
        found = await asyncio.to_thread(_counted, function, *arguments, **given)
        return await found if inspect.isawaitable(found) else found
    except SystemExit as error:
        raise RuntimeError(f"sys.exit({error.code!r})") from None
