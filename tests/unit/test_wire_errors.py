"""An error arrives at the other end as what it was, or as the nearest that the other end knows."""

from __future__ import annotations

import asyncio

import pytest

from runtime import errors
from services.rpc import wire_errors
from services.rpc.generated import common_pb2


def over_the_wire(error: BaseException) -> Exception:
    message = common_pb2.Error.FromString(wire_errors.error_to_wire(error).SerializeToString())
    return wire_errors.error_from_wire(message, "rollout-0", "Generate")


@pytest.mark.parametrize(
    "error",
    [
        errors.UserError("data.train: no such file"),
        errors.InvalidMessage("schema 2"),
        errors.Cancelled("group 5 was cancelled"),
        errors.InvariantViolated("trained twice"),
        errors.ServiceFault("reward-1", "score", "a worker died"),
        errors.ServiceFault("reward-1", "score", "a worker died", 2.5),
        errors.DeadlineExceeded("trainer-0", "Apply", "was not reached in time", 30.0),
    ],
)
def test_sluices_own_errors_arrive_as_they_were(error: errors.SluiceError) -> None:
    arrived = over_the_wire(error)
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert vars(arrived) == vars(error)


@pytest.mark.parametrize(
    ("found", "told"), [(errors.Unreachable, errors.ServiceFault), (errors.Unanswered, errors.DeadlineExceeded)]
)
def test_what_a_caller_finds_out_about_its_peer_is_not_taken_for_its_own_fault(
    found: type[errors.ServiceFault], told: type[errors.ServiceFault]
) -> None:
    error = found("rollout-1", "transfer", "is gone", 2.0)
    arrived = over_the_wire(error)
    assert type(arrived) is told
    assert vars(arrived) == vars(error)


def test_faults_of_a_configuration_arrive_one_by_one() -> None:
    arrived = over_the_wire(errors.ConfigError(["run.name: is missing", "training.steps: must be >= 1"]))
    assert isinstance(arrived, errors.ConfigError)
    assert arrived.faults == ["run.name: is missing", "training.steps: must be >= 1"]


class Hung(errors.DeadlineExceeded):
    """An error that only one side knows."""


def test_an_error_that_the_other_end_does_not_know_arrives_as_the_nearest_that_it_does() -> None:
    arrived = over_the_wire(Hung("trainer-0", "step", "rank 3 is silent", 30.0))
    assert type(arrived) is errors.DeadlineExceeded
    assert str(arrived) == "trainer-0: step: rank 3 is silent (deadline 30 s)"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("bad shape"), "rollout-0: Generate: ValueError: bad shape"),
        (KeyError("x"), "rollout-0: Generate: KeyError: 'x'"),
        (asyncio.CancelledError(), "rollout-0: Generate: CancelledError: "),
        (errors.SluiceError("plain"), "rollout-0: Generate: SluiceError: plain"),
    ],
)
def test_any_other_error_is_a_fault_of_the_service(error: BaseException, message: str) -> None:
    arrived = over_the_wire(error)
    assert type(arrived) is errors.ServiceFault
    assert str(arrived) == message


@pytest.mark.parametrize("kind", ["", "Sequence", "annotations", "SluiceError", "__name__", "Exception"])
def test_an_unknown_kind_is_a_fault_of_the_service(kind: str) -> None:
    arrived = wire_errors.error_from_wire(common_pb2.Error(kind=kind, message="m"), "reward-0", "Score")
    assert type(arrived) is errors.ServiceFault
    assert (arrived.service, arrived.phase) == ("reward-0", "Score")


def test_an_error_that_is_not_utf8_arrives() -> None:
    for error in (ValueError("no file \udcff"), errors.ServiceFault("a", "b", "no file \udcff")):
        assert "no file ?" in str(over_the_wire(error))
