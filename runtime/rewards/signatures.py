"""Reward functions as other trainers call them, told by the names of their parameters.

| shape | told by | is called with |
| --- | --- | --- |
| verl's | `solution_str` | `data_source`, `solution_str`, `ground_truth`, `extra_info`; may give a dict with `score` |
| TRL's | `completions` | `prompts`, `completions` and columns of the row, each a list over the group; gives a list |
| a rule's | neither | `(text, label, context)` |
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.rewards.rules import GroupContext, RuleContext

VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
LABEL_COLUMNS = ("label", "ground_truth", "answer", "solution", "target")
"""Under each of these names a function of TRL's shape finds the label, unless the row has such a column of its own."""

Ours = Callable[..., Any]


def adapted(function: Callable[..., Any]) -> tuple[Ours, bool]:
    """Return the function as one of (text, label, context), and whether it judges whole groups: (texts, label, context).

    A coroutine function stays one. Raises TypeError for a function that needs an argument which no rule gets.
    """
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # some functions of C have no signature
        return function, False
    if "solution_str" in parameters:
        if others := [name for name in _required(parameters) if name not in VERL]:
            raise TypeError(f"takes {', '.join(others)}, which verl's reward functions do not get; allowed: {', '.join(VERL)}")
        return _called(function, lambda *given: _chosen(parameters, _verl_arguments(*given)), _verl_score), False
    if "completions" in parameters:
        if "completion_ids" in _required(parameters):
            raise TypeError("takes completion_ids, and rules get no token ids; take completions")
        return _called(function, lambda *given: _trl_arguments(parameters, *given), _trl_scores), True
    return function, False


def _called(function: Callable[..., Any], arguments: Callable[..., dict[str, Any]], result: Callable[[Any], Any]) -> Ours:
    if inspect.iscoroutinefunction(function):

        async def later(text: Any, label: str, context: Any) -> Any:
            return result(await function(**arguments(text, label, context)))

        return later
    return lambda text, label, context: result(function(**arguments(text, label, context)))


def _required(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [name for name, each in parameters.items() if each.default is each.empty and each.kind not in variable]


def _chosen(parameters: Mapping[str, inspect.Parameter], given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that the function has a parameter for. A function with **kwargs takes all."""
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return given
    return {name: value for name, value in given.items() if name in parameters}


def _verl_arguments(text: str, label: str, context: RuleContext) -> dict[str, Any]:
    """`data_source` and `extra_info`: columns of these names, else the file, and all of `data.additional_keys`."""
    extra = context.extra.get("extra_info", context.extra)
    source = context.extra.get("data_source", context.source)
    return dict(zip(VERL, (source, text, label, extra), strict=True))


def _verl_score(found: Any) -> Any:
    return found["score"] if isinstance(found, Mapping) else found


def _trl_arguments(
    parameters: Mapping[str, inspect.Parameter], texts: list[str], label: str, context: GroupContext
) -> dict[str, Any]:
    """A completion is a list of one message, as the prompts are conversations."""
    columns: dict[str, Any] = dict.fromkeys(LABEL_COLUMNS, label) | context.extra
    given = {name: [value] * len(texts) for name, value in columns.items()}
    given["prompts"] = [context.prompt] * len(texts)
    given["completions"] = [[{"role": "assistant", "content": text}] for text in texts]
    if absent := [name for name in _required(parameters) if name not in given]:
        raise KeyError(f"the row has no column {', '.join(absent)}; data.additional_keys names the columns that rules get")
    return _chosen(parameters, given)


def _trl_scores(found: Any) -> list[Any]:
    """TRL leaves a None out of a reply's sum of rewards, so None is 0."""
    return [0.0 if each is None else each for each in found]
