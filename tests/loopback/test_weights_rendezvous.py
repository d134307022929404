"""How the members of a weight group find each other, and what a user may have set wrongly."""

from __future__ import annotations

import socket
import subprocess
import sys

import msgspec
import pytest

from runtime.errors import ServiceFault, UserError
from runtime.weights.plan import GroupAddress
from runtime.weights.rendezvous import host, join
from runtime.weights.sender import in_thread
from tests.loopback.weight_cases import IN_A_STORE, PATIENCE, transport_and_encoding
from tests.loopback.weight_members import ROOT


@pytest.mark.parametrize("transport", IN_A_STORE)
def test_the_rendezvous_names_who_is_missing(transport: str) -> None:
    transport, full_every = transport_and_encoding(transport)
    names = ("trainer", "rollout-0", "rollout-1")
    pending = host(1, 4, "127.0.0.1", "gloo", 4.0, "trainer", transport, full_every=full_every, names=names)
    other = in_thread("join", lambda: join(msgspec.structs.replace(pending.address, rank=2, timeout=PATIENCE), "rollout-1"))
    with pytest.raises(ServiceFault, match=r"trainer: rendezvous: rank 1 \(rollout-0\), rank 3 did not join \(deadline 4 s\)"):
        pending.connect()
    with pytest.raises(ServiceFault, match="rollout-1: rendezvous: "):
        other.result(2 * PATIENCE)


def test_nobody_at_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    address = GroupAddress(epoch=1, host="127.0.0.1", port=port, rank=1, world_size=2, backend="gloo", timeout=0.3, key=b"")
    with pytest.raises(ServiceFault, match=f"rollout-0: rendezvous: rank 0 at 127.0.0.1:{port} cannot be reached"):
        join(address, "rollout-0")


def test_the_rendezvous_listens_on_the_given_interface_alone() -> None:
    pending = host(1, 2, "lo", "gloo", 1.0)
    assert pending.address.host == "127.0.0.1"
    with socket.create_connection(("127.0.0.1", pending.address.port), 1.0):
        pass
    with pytest.raises(OSError), socket.create_connection(("127.0.0.2", pending.address.port), 1.0):
        pass


def test_the_rendezvous_takes_a_port_of_the_range() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(UserError, match=f"^network.port_range: all ports from {port} to {port} are in use on 127.0.0.1$"):
            host(1, 2, "lo", "gloo", 1.0, port_range=(port, port))
    pending = host(1, 2, "lo", "gloo", 1.0, port_range=(port, port))
    assert pending.address.port == port
    pending.abort()


@pytest.mark.parametrize(
    ("interface", "backend", "fault"), [("nowhere0", "gloo", "network.interface"), ("lo", "mpi", "backend")]
)
def test_a_user_mistake_is_one_line(interface: str, backend: str, fault: str) -> None:
    with pytest.raises(UserError, match=fault) as caught:
        host(1, 2, interface, backend, 1.0)
    assert "\n" not in str(caught.value)


LEAVE_AND_END = """
from tests.loopback.weight_aborts import connected
for group in connected("collective", 3):
    group.abort()
"""


def test_a_process_that_ends_as_it_leaves_its_groups_ends_well() -> None:
    ended = subprocess.run([sys.executable, "-c", LEAVE_AND_END], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 0, ended.stderr
