"""Remote nodes with an agent: process control, logs at the driver, and loss of the node."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slime.cluster.node import OWN_PYTHON, NodeLost, ProcessCommand
from slime.cluster.remote.agent import OK, USER_ERROR, NodeAgent
from slime.cluster.remote.node import LOST_CODE, RemoteNode
from slime.cluster.rpc.connect import Listener
from slime.cluster.watchdog import state_of
from slime.errors import RunFailed, UserError


class InProcessAgent:
    """An agent in this process; `is_gone` simulates a node that cannot be reached."""

    def __init__(self) -> None:
        self.agent = NodeAgent(os.getcwd())
        self.is_gone = False

    def call(self, method: str, *args: Any, timeout_s: float = 60.0) -> Any:
        if self.is_gone:
            raise NodeLost("the node far cannot be reached")
        kind, value = self.agent.call(method, *args)
        if kind == OK:
            return value
        raise UserError(value) if kind == USER_ERROR else RunFailed(value)


@pytest.fixture
def near() -> Iterator[InProcessAgent]:
    agent = InProcessAgent()
    yield agent
    agent.agent.close()


@pytest.fixture
def node(near: InProcessAgent) -> Iterator[RemoteNode]:
    listener = Listener("127.0.0.1", "token")
    node = RemoteNode("far", "127.0.0.1", 2, near.call, listener, "token")
    yield node
    node.close()
    listener.close()


def python(name: str, code: str, **fields: Any) -> ProcessCommand:
    return ProcessCommand(name, (OWN_PYTHON, "-c", code), **fields)


def test_log_and_exit_code_of_a_remote_process_reach_the_driver(node: RemoteNode, tmp_path: Path) -> None:
    log = tmp_path / "logs" / "one.log"
    process = node.start(python("one", "import os; print(os.environ['WORD'] * 3); exit(7)", env={"WORD": "so "}), log)
    assert process.wait(120) == 7
    assert log.read_text() == "so so so \n"
    assert process.tail() == "so so so"
    assert process.state() == "one on far is gone"


def test_long_log_is_complete_when_the_exit_code_arrives(node: RemoteNode, tmp_path: Path) -> None:
    log = tmp_path / "long.log"
    process = node.start(python("long", "print('x' * 9_000_000, end='!')"), log)
    assert process.wait(120) == 0
    assert log.stat().st_size == 9_000_001


def test_remote_process_serves_a_channel_until_it_is_stopped(node: RemoteNode, tmp_path: Path) -> None:
    code = (
        "import argparse\n"
        "from slime.cluster.rpc.connect import add_channel_flags, channel_from\n"
        "parser = argparse.ArgumentParser(); add_channel_flags(parser)\n"
        "channel = channel_from(parser.parse_args())\n"
        "while True: channel.send({'twice': 2 * channel.recv(None)['number']})\n"
    )
    process, channel = node.start_connected(python("served", code), tmp_path / "served.log")
    channel.send({"number": 21})
    assert channel.recv(120.0) == {"twice": 42}
    assert str(state_of("served")).endswith(" on far")
    assert process.stop(120.0) == -signal.SIGTERM
    channel.close()


def test_terminate_reaches_the_process_through_the_agent(
    node: RemoteNode, near: InProcessAgent, tmp_path: Path
) -> None:
    process = node.start(python("sleeper", "import time; time.sleep(600)"), tmp_path / "s.log")
    there = near.agent._processes[0]
    assert process.poll() is None
    process.terminate()
    assert process.wait(120) == -signal.SIGTERM
    assert there.poll() == -signal.SIGTERM


def test_processes_of_a_lost_node_report_the_lost_code(node: RemoteNode, near: InProcessAgent, tmp_path: Path) -> None:
    process = node.start(python("left", "import time; time.sleep(600)"), tmp_path / "left.log")
    near.is_gone = True
    assert process.wait(120) == LOST_CODE
    assert node.is_lost
    assert process.tail() == "its node (far) is gone: the node far cannot be reached"
    with pytest.raises(NodeLost, match="the node far is gone"):
        node.start(python("next", ""), tmp_path / "next.log")
    process.stop()  # returns at once: no process is left


def test_user_error_of_the_agent_is_raised_at_the_driver(node: RemoteNode, tmp_path: Path) -> None:
    node._listener.close()
    with pytest.raises(UserError, match=r"the driver cannot be reached at 127\.0\.0\.1:\d+ \("):
        node.start_connected(python("lonely", ""), tmp_path / "lonely.log")


def test_paths_are_mapped_to_paths_of_the_node(node: RemoteNode) -> None:
    node.paths["/data/model"] = "/cache/model-1/model"
    assert node.path("/data/model") == "/cache/model-1/model"
    assert node.path("/data/model/part/a") == "/cache/model-1/model/part/a"
    assert node.path("/data/models") == "/data/models"
    assert node.path("rel") == str(Path.cwd() / "rel")
