"""How a step is cut into updates, when it may be given in parts, and what functions of the user's are called with."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch

from launcher.registered_names import faults_of_own_files
from runtime.algorithms.interfaces import ADVANTAGES, POLICY_LOSSES, LossOutputs, require_loss
from runtime.chosen_algorithm import choose, groups_per_update, streams, updates_per_epoch, with_options
from runtime.config import Algorithm, Config, Data, Evaluation, EvaluationSet, Run, Source, Training
from runtime.errors import UserError
from runtime.registry import Registry
from tests.unit.config_cases import cases


@pytest.mark.parametrize(("mini_batch", "size", "updates"), [(0, 8, 1), (8, 8, 1), (2, 2, 4)])
def test_a_step_makes_an_update_for_every_mini_batch(mini_batch: int, size: int, updates: int) -> None:
    config = Config(run=Run(name="a"), training=Training(groups_per_step=8, mini_batch_size=mini_batch))
    assert (groups_per_update(config), updates_per_epoch(config)) == (size, updates)


@pytest.mark.parametrize(
    ("algorithm", "training", "streamed"),
    [
        ({"advantage": "group_norm"}, {}, True),
        ({"advantage": "opo"}, {"mini_batch_size": 8}, True),
        ({}, {"mini_batch_size": 4}, False),
        ({}, {"epochs": 2}, False),
        *(({"advantage": name}, {}, False) for name in ("reinforce_plus_plus", "gpg")),
        *(({"loss": name}, {}, False) for name in ("clip_cov", "kl_cov", "m2po")),  # these choose among the tokens of a step
    ],
)
def test_only_one_update_of_local_advantages_is_given_in_parts(
    algorithm: dict[str, str], training: dict[str, int], streamed: bool
) -> None:
    steps = Training(groups_per_step=8, **training)
    assert streams(Config(run=Run(name="a"), algorithm=Algorithm(**algorithm), training=steps)) is streamed


@pytest.mark.parametrize(("key", "registry"), [("loss", POLICY_LOSSES), ("advantage", ADVANTAGES)])
def test_the_pages_name_all_that_come_along(key: str, registry: Registry[Any]) -> None:
    docs = Path(__file__).parents[2] / "docs"
    reference = (docs / "configuration-reference.md").read_text().splitlines()
    (row,) = (line for line in reference if line.startswith(f"| `algorithm.{key}` |"))
    guide = (docs / "guides/algorithms.md").read_text()
    come_along = {name for name in registry if registry.find(name).compute.__module__.startswith("runtime.algorithms.")}
    assert len(come_along) > 5
    assert [name for name in sorted(come_along) if f"`{name}`" not in row] == []
    assert [name for name in sorted(come_along) if key == "loss" and f"`{name}`" not in guide] == []


OWN = """
from __future__ import annotations

from typing import TYPE_CHECKING

from sluice import LossOutputs, advantage, policy_loss

if TYPE_CHECKING:
    from torch import Tensor


@policy_loss("{name}", zero_without_advantage=True)
def scaled(inputs: Tensor, options, scale: float, *, signed: bool = True, {more}):
    return LossOutputs(-scale * inputs.logp * inputs.advantages)


@advantage("{name}", streamable=True)
def of_group(inputs, options, share: float = 0.5):
    return share * inputs.rewards[:, None]
"""


def with_own(folder: Path, more: str = "offset: int = 0", **options: Any) -> Config:
    """A configuration with the functions above, which have a name of their own in each test."""
    path = folder / "own.py"
    path.write_text(OWN.format(name=folder.name, more=more))
    name = f"{path}:{folder.name}"
    return Config(run=Run(name="a"), algorithm=Algorithm(loss=name, advantage=name, **options))


def test_a_function_of_the_users_gets_the_options_of_the_configuration(tmp_path: Path) -> None:
    chosen = choose(with_own(tmp_path, loss_options={"scale": 3, "offset": 2}, advantage_options={"share": 0.25}))
    inputs = SimpleNamespace(logp=2.0, advantages=5.0, rewards=np.array([4.0, 8.0]))
    assert chosen.loss.compute(inputs, chosen.loss_options).loss == -30.0  # type: ignore[arg-type]
    assert chosen.advantage.compute(inputs, chosen.advantage_options).tolist() == [[1.0], [2.0]]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"loss_options": {}}, "algorithm.loss_options.scale: is missing, and scaled needs it"),
        ({"loss_options": {"scale": "high"}}, "algorithm.loss_options.scale: 'high' is not float"),
        ({"loss_options": {"scale": 1.0, "signed": 1}}, "algorithm.loss_options.signed: 1 is not bool"),
        (
            {"loss_options": {"scale": 1.0, "sacle": 2.0}},
            "algorithm.loss_options.sacle: 2.0: scaled takes no such option; allowed: scale, signed, offset",
        ),
        (
            {"loss_options": {"scale": 1.0}, "advantage_options": {"part": 1}},
            "algorithm.advantage_options.part: 1: of_group takes no such option; allowed: share",
        ),
    ],
)
def test_options_that_a_function_does_not_take_are_refused(tmp_path: Path, options: dict[str, Any], fault: str) -> None:
    config = with_own(tmp_path, **options)
    with pytest.raises(UserError, match=f"^{re.escape(fault)}$"):
        choose(config)
    assert list(faults_of_own_files(config)) == [fault]


def test_a_function_without_the_decorator_is_not_found(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text("def mine(inputs, options):\n    return None\n")
    fault = f"algorithm.loss: unknown name 'mine'; no decorator in {path} registers it"
    with pytest.raises(UserError, match=f"^{re.escape(fault)}$"):
        choose(Config(run=Run(name="a"), algorithm=Algorithm(loss=f"{path}:mine")))


def test_a_function_of_one_argument_is_refused() -> None:
    with pytest.raises(UserError, match=r"^algorithm\.loss: <lambda> takes 1 arguments, and gets two: inputs and options$"):
        with_options(lambda inputs: inputs, {}, "algorithm.loss_options")


def test_an_option_of_several_words_says_which() -> None:
    def lose(inputs: Any, options: Any, kind: Literal["soft", "hard"]) -> None: ...

    with pytest.raises(UserError, match=r"^key\.kind: 'hrad' is not Literal\['soft', 'hard'\]$"):
        with_options(lose, {"kind": "hrad"}, "key")


def test_a_handler_of_one_file_is_looked_for_too(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text("raise ValueError('of another version')")
    data = Data(train=[Source(path="a.jsonl"), Source(path="b.jsonl", handler=f"{path}:mine")])
    evaluation = Evaluation(sets=[EvaluationSet(name="c", path="c.jsonl", handler=f"{path}:mine")])
    fault = f"{path.resolve()} cannot be imported: ValueError: of another version"
    found = list(faults_of_own_files(Config(run=Run(name="a"), data=data, evaluation=evaluation)))
    assert found == [f"data.train.1.handler: {fault}", f"evaluation.sets.0.handler: {fault}"]


def test_a_function_may_take_whatever_it_is_given(tmp_path: Path) -> None:
    choose(with_own(tmp_path, more="**others", loss_options={"scale": 1.0, "anything": [1]}))


def test_options_are_what_comes_behind_the_two_arguments() -> None:
    """Whatever they are called: a function of `*arguments` has options too, and its arguments are no options."""

    def starred(*arguments: Any, scale: int) -> Any:
        return scale * sum(arguments)

    def whatever(inputs: Any, options: Any, **more: int) -> Any:
        return more

    assert with_options(starred, {"scale": 2}, "key")(1, 2) == 6
    assert with_options(whatever, {"anything": 1}, "key")(1, 2) == {"anything": 1}
    with pytest.raises(UserError, match=r"^key\.inputs: 1: whatever takes it as an argument already$"):
        with_options(whatever, {"inputs": 1}, "key")


INPUTS: Any = SimpleNamespace(mask=torch.ones(2, 3), logp=torch.zeros(2, 3, requires_grad=True))
LOSS: Any = -INPUTS.logp


@pytest.mark.parametrize(
    ("outputs", "fault"),
    [
        (LOSS, " gives Tensor; allowed: LossOutputs"),
        (LossOutputs(LOSS.mean()), ": its loss is of shape []; allowed: [2, 3], [B, T]"),
        (LossOutputs(LOSS.detach()), ": its loss has no gradient: it does not depend on inputs.logp, or is detached"),
        (LossOutputs(LOSS, {"actor/kl": LOSS}), ": its metric 'actor/kl' is reported of every loss; allowed: another name"),
        (LossOutputs(LOSS, {"a": LOSS, "b": 1.0}), ": its metric 'b' is float; allowed: [2, 3] or [2, 1], [B, T] or [B, 1]"),
    ],
)
def test_what_a_loss_may_not_give(outputs: Any, fault: str) -> None:
    with pytest.raises(UserError, match=f"^{re.escape('algorithm.loss: mine' + fault)}$"):
        require_loss(outputs, INPUTS, "mine")
    good = LossOutputs(LOSS, {"a": LOSS[:, :1]})
    assert require_loss(good, INPUTS, "mine") is good


BUILT_IN = """
loss: ppo, loss_options: {clip: 0.1} => loss_options.clip: 0.1: ppo takes no such option; it takes none
loss: clip_cov, loss_options: {kl: 1} => loss_options.kl: 1: clip_cov takes no such option; allowed: share, low, high
loss: kl_cov, loss_options: {low: 1} => loss_options.low: 1: kl_cov takes no such option; allowed: kl, share
loss: kl_cov, loss_options: {share: 1.5} => loss_options.share: 1.5 is not float >= 0 <= 1
loss: sapo, loss_options: {tau_positive: 0} => loss_options.tau_positive: 0 is not float > 0
loss_options: {weight_over: cut} => loss_options.weight_over: 'cut' is not Literal['clamp', 'drop']
advantage_options: {ddof: 2} => advantage_options.ddof: 2 is not Literal[0, 1]
advantage: gae, advantage_options: {whitened: 1} => advantage_options.whitened: 1 is not bool
"""


@pytest.mark.parametrize(("algorithm", "fault"), cases(BUILT_IN))
def test_what_a_function_of_sluice_does_not_take_is_refused(algorithm: dict[str, Any], fault: str) -> None:
    with pytest.raises(UserError, match=f"^{re.escape('algorithm.' + fault)}$"):
        choose(Config(run=Run(name="a"), algorithm=Algorithm(**algorithm)))


def test_options_reach_what_else_a_function_is_registered_with() -> None:
    options: dict[str, Any] = {"advantage": "gae", "loss": "kl_cov", "loss_options": {"kl": 0.5, "share": 0.1}}
    chosen = choose(Config(run=Run(name="a"), algorithm=Algorithm(**options, advantage_options={"whitened": False})))
    assert chosen.advantage.streams(chosen.advantage_options)
    assert (chosen.loss.compute.keywords, chosen.loss.chooses.keywords) == ({"kl": 0.5}, {"share": 0.1})  # type: ignore
