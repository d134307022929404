"""Errors as messages: what a process raises reaches its caller as the same error."""

from __future__ import annotations

from runtime import errors
from services.rpc.generated import common_pb2

# The errors that arrive as they were. Unreachable and Unanswered are not among them: they are what a caller finds out about
# its own peer, and the caller's caller must not take them for its.
TOLD = (
    errors.UserError,
    errors.StorageFull,
    errors.ConfigError,
    errors.InvalidMessage,
    errors.Cancelled,
    errors.Forbidden,
    errors.ServiceFault,
    errors.DeadlineExceeded,
    errors.InvariantViolated,
)


def error_to_wire(error: BaseException) -> common_pb2.Error:
    """Any exception as a message; what is not Sluice's own becomes a ServiceFault at the other end."""
    kind = next((kind for kind in type(error).__mro__ if kind in TOLD), type(error))
    out = common_pb2.Error(kind=kind.__name__, message=text(str(error)))
    if isinstance(error, errors.ServiceFault):
        out.service, out.phase, out.message = error.service, error.phase, text(error.reason)
        out.deadline = error.deadline or 0.0
    if isinstance(error, errors.StorageFull):
        out.message = text(error.path)
    return out


def text(text: str) -> str:
    """What protobuf takes as a string: the name of a file, say, need not be UTF-8."""
    return text.encode(errors="replace").decode()


def error_from_wire(error: common_pb2.Error, service: str, phase: str) -> Exception:
    """The exception that `error_to_wire` saw; `service` and `phase` say where, when the message does not."""
    kind = getattr(errors, error.kind, None)
    if kind is errors.ConfigError:
        return errors.ConfigError(error.message.splitlines())
    if kind in (errors.ServiceFault, errors.DeadlineExceeded):
        return kind(error.service, error.phase, error.message, error.deadline or None)
    if kind in TOLD:
        return kind(error.message)
    return errors.ServiceFault(service, phase, f"{error.kind}: {error.message}")
