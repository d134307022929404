"""Rows that an agent plays: whose they are, and what it is told of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime import config
from runtime.coordinator.gateways import request_for
from runtime.data.handlers import Problem, ProblemSet, load_problems
from runtime.data.prompts import tokenise
from runtime.data.sources import check_environments
from runtime.errors import UserError
from runtime.types import PlayRequest, SamplingParams

ROWS: list[dict[str, Any]] = [
    {"who": "maze", "size": 3, "walls": [[0, 1]]},
    {"who": "shop", "messages": [{"role": "user", "content": "a hat"}], "label": "hat", "price": 2.5},
]


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def problems(tmp_path: Path, rows: list[Any] = ROWS, **data: Any) -> list[Problem]:
    return load_problems(write(tmp_path / "train.jsonl", rows), config.Data(handler="task", **data)).problems


def test_rows_say_whose_they_are_and_are_told_whole(tmp_path: Path) -> None:
    maze, shop = problems(tmp_path, environment_key="who", environment="game")
    assert (maze.environment, maze.messages, maze.label, maze.extra) == ("maze", [], "", ROWS[0])
    assert (shop.environment, shop.messages, shop.label) == ("shop", ROWS[1]["messages"], "hat")
    assert shop.extra["price"] == 2.5
    assert json.loads(maze.question) == ROWS[0] and shop.question == "a hat"


def test_a_source_says_whose_its_rows_are_and_else_they_are_nobodys(tmp_path: Path) -> None:
    assert {each.environment for each in problems(tmp_path, environment="game")} == {"game"}
    nobodys = problems(tmp_path)
    assert [(each.environment, each.extra) for each in nobodys] == [("", {}), ("", {})]


def test_a_row_without_a_name_is_left_out_and_a_file_without_the_column_is_a_mistake(tmp_path: Path) -> None:
    rows = [ROWS[0], {"who": ""}, {"who": None}, {"who": 3}]
    path = write(tmp_path / "a.jsonl", rows)
    found = load_problems(path, config.Data(handler="task", environment_key="who"))
    assert (len(found.problems), found.dropped) == (1, {"row that names no environment": 3})
    with pytest.raises(UserError, match=r"^data.environment_key: .*a.jsonl:1 has no column 'whose'"):
        load_problems(path, config.Data(handler="task", environment_key="whose"))


def test_a_file_without_tasks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^data.train: .*"):
        problems(tmp_path, rows=[])


def test_a_row_that_names_an_unknown_environment_is_named(tmp_path: Path) -> None:
    found = problems(tmp_path, environment_key="who")
    check_environments(found, ["maze", "shop"])
    with pytest.raises(UserError, match=rf"^{tmp_path.name}/train:2: environment 'shop' is not one of .*: maze, game$"):
        check_environments(found, ["maze", "game"])
    with pytest.raises(UserError, match=r"train:1: environment 'maze' .*: there is none$"):
        check_environments(found, [])
    with pytest.raises(UserError, match=r"train:1: environment '' is not one of .*: game$"):
        check_environments(problems(tmp_path), ["game"])
    check_environments(problems(tmp_path), [])


class CountedTokenizer:
    """Of each conversation as many tokens as it has characters."""

    def encode_chats(self, conversations: list[list[dict[str, str]]]) -> list[np.ndarray]:
        assert all(conversations)
        return [np.ones(sum(len(each["content"]) for each in messages), np.int32) for messages in conversations]


def test_a_task_without_a_conversation_has_no_tokens_and_is_never_too_long(tmp_path: Path) -> None:
    found = problems(tmp_path, environment_key="who")
    kept = tokenise(ProblemSet(problems=[found[1], found[0]], rows=2, dropped={}), CountedTokenizer(), 5, "data.train")  # type: ignore[arg-type]
    assert [len(each) for each in kept.tokens] == [5, 0]
    kept = tokenise(ProblemSet(problems=[found[1], found[0]], rows=2, dropped={}), CountedTokenizer(), 4, "data.train")  # type: ignore[arg-type]
    assert [each.environment for each in kept.problems] == ["maze"]


def test_what_a_gateway_is_asked_has_the_task(tmp_path: Path) -> None:
    maze, _ = problems(tmp_path, environment_key="who")
    whole = config.Config(run=config.Run(name="a"), gateway=config.Gateway())
    asked = request_for(whole, maze, np.zeros(0, np.int32), group_id=1, n=2, seed=3, sampling=SamplingParams(max_new_tokens=4))
    assert isinstance(asked, PlayRequest)
    assert (asked.task.environment, asked.task.extra) == ("maze", ROWS[0])
