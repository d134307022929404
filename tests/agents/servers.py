"""Servers that came with their packages, each on a free port of loopback."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

TIME = "from mcp_server_time.server import create_server; create_server('UTC').run('streamable-http', port=0)"


@contextlib.contextmanager
def uvicorn(*command: str, folder: Path) -> Iterator[str]:
    """The URL of a server that says where it runs, once it does."""
    with subprocess.Popen([sys.executable, *command], cwd=folder, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            found = next(filter(None, (re.search(r"http://[\d.]+:\d+", line) for line in process.stderr)))
            yield found[0]
        finally:
            process.terminate()
            process.communicate()


@contextlib.contextmanager
def mcp_time(folder: Path) -> Iterator[str]:
    """mcp-server-time, by streamable HTTP: its URL."""
    with uvicorn("-c", TIME, folder=folder) as url:
        yield f"{url}/mcp"


@contextlib.contextmanager
def openenv_echo(folder: Path) -> Iterator[str]:
    """The environment that OpenEnv's own template makes: it repeats what it is told, and a message earns 0.1 a character."""
    init = [str(Path(sys.executable).with_name("openenv")), "init", "echo_demo"]
    subprocess.run(init, cwd=folder, check=True, capture_output=True, timeout=200)  # 5 s of a processor that others want too
    with uvicorn("-m", "uvicorn", "server.app:app", "--host", "127.0.0.1", "--port", "0", folder=folder / "echo_demo") as url:
        yield url
