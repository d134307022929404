"""`python -m sluice.health_check HOST:PORT`: check whether a process serves, for tools that run commands but not gRPC.

Asks `grpc.health.v1`, which every process of a run answers, and prints one line. Exit codes: 0 it serves, 1 it does not serve
or does not answer, 2 a mistake of the user."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from runtime import timeouts
from runtime.errors import UserError
from runtime.process import keys, network, os_process
from runtime.process.keys import Keys
from runtime.telemetry.shown import shown
from services.rpc import security

_OPTIONS = (("grpc.enable_http_proxy", 0),)  # connect directly, whatever the environment says
_STATES = health_pb2.HealthCheckResponse.ServingStatus


def main(arguments: Sequence[str] | None = None) -> int:
    parser = os_process.CommandParser(prog="python -m sluice.health_check", description=__doc__.split("\n\n")[0])
    parser.add_argument("address", type=_address, help="host:port, or [IPv6]:port")
    parser.add_argument("--run", default="", metavar="DIR", help="the run's folder, needed if the run has TLS")
    parser.add_argument("--service", default="", metavar="NAME", help="such as sluice.v1.Trainer (default: the process)")
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=timeouts.HEALTH_CHECK,
        metavar="SECONDS",
        help="until an answer (default: %(default)g)",
    )
    options = parser.parse_args(arguments)
    try:
        own = keys.of_user(options.run or options.address)
    except UserError as error:
        os_process.say_errors(str(error).splitlines())
        return 2
    serves, word = check(options.address, options.service, options.timeout, own)
    print(shown(f"{options.address}: {word}"), file=sys.stdout if serves else sys.stderr)
    return 0 if serves else 1


def check(address: str, service: str = "", timeout: float = timeouts.HEALTH_CHECK, own: Keys | None = None) -> tuple[bool, str]:
    """Return whether `service` of the process at `address` serves ("" = the process as a whole), and a word for its state."""
    with security.connection(grpc, address, own, "", _OPTIONS) as channel:
        try:
            request = health_pb2.HealthCheckRequest(service=service)
            reply = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout, wait_for_ready=True)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                hint = "; a process with TLS answers only with --run DIR or SLUICE_SECRET"
                return False, f"no answer within {timeout:g} s{'' if own is not None and own.tls else hint}"
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return False, f"has no service {service!r}"
            return False, f"{error.code().name}: {error.details()}"
    return reply.status == _STATES.SERVING, _STATES.Name(reply.status).lower().replace("_", " ")


def _address(text: str) -> str:
    if not network.is_host_port(text):
        raise argparse.ArgumentTypeError(f"'{text}' is not host:port or [IPv6]:port")
    return text


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of seconds above 0")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
