"""Nodes made of namespaces: they reach each other alone, links are cut and mended, and nothing of them stays."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.system import namespaces as spaces
from tests.system.namespaces import Node, joined
from tests.system.runs import ROOT, eventually

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("namespaces")]

PORT = 7000
PATIENCE = 60.0

# Answers every line of every connection with the same line.
ECHO = f"""
import socketserver, sys
class Echo(socketserver.StreamRequestHandler):
    def handle(self):
        for line in self.rfile:
            self.wfile.write(line)
with socketserver.ThreadingTCPServer((sys.argv[1], {PORT}), Echo) as server:
    print("listening", flush=True)
    server.serve_forever()
"""
# Sends what comes on stdin over one connection, and says what came back, or what broke.
ASK = f"""
import socket, sys
connection = socket.create_connection((sys.argv[1], {PORT}), 2.0)
file = connection.makefile("rw")
print("connected", flush=True)
connection.settimeout({PATIENCE})
for line in sys.stdin:
    file.write(line)
    file.flush()
    print(file.readline(), end="", flush=True)
"""


def talking(node: Node, script: str, *arguments: str) -> subprocess.Popen[str]:
    """A script in a node, once it has said its first word."""
    process = node.start([sys.executable, "-c", script, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() in ("listening\n", "connected\n")
    return process


def ask(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{word}\n")
    process.stdin.flush()


def heard(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def reaches(node: Node, other: Node) -> bool:
    command = [sys.executable, "-c", ASK, other.address]
    return node.start(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).wait(PATIENCE) == 0


def test_a_cut_link_loses_packets_and_a_mended_one_brings_what_waited() -> None:
    with joined(3) as network:
        first, second, third = network.nodes
        talking(second, ECHO, second.address)
        asker = talking(first, ASK, second.address)
        ask(asker, "before")
        assert heard(asker) == "before"
        network.cut(second)
        ask(asker, "meanwhile")
        assert not reaches(third, second)
        assert asker.poll() is None  # nobody told it that the link is gone
        network.mend(second)
        assert heard(asker) == "meanwhile"
        assert reaches(third, second)


def test_a_node_that_is_killed_takes_no_other_with_it() -> None:
    with joined(2) as network:
        first, second = network.nodes
        ours, theirs = talking(first, ECHO, first.address), talking(second, ECHO, second.address)
        child = f"import subprocess; subprocess.Popen({[sys.executable, '-c', ECHO, '127.0.0.1']!r}).wait()"
        second.start([sys.executable, "-c", child], stdout=subprocess.PIPE).stdout.readline()  # type: ignore[union-attr]
        assert len(second.processes()) == 3
        second.kill()
        assert second.processes() == []
        assert theirs.wait(PATIENCE) < 0
        assert ours.poll() is None
    assert ours.wait(PATIENCE) < 0


MAKER = """
import os, sys
from tests.system.namespaces import joined
with joined(2) as network:
    network.nodes[0].start(["sleep", "1000"])
    print(os.getpid(), flush=True)
    sys.stdin.read()
"""


def test_what_a_killed_maker_leaves_is_removed_by_the_next() -> None:
    maker = subprocess.Popen([sys.executable, "-c", MAKER], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    pid = heard(maker)
    left = Node(f"sluice-{pid}-node0", "")
    # It begins as `ip`, which becomes what it runs.
    eventually(lambda: [process.name() for process in left.processes()] == ["sleep"], PATIENCE, "the node's process")
    spaces.sweep()
    assert left.processes() != []  # its maker lives
    maker.kill()
    maker.wait(PATIENCE)
    spaces.sweep()
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert f"sluice-{pid}-" not in listed
