"""Containers against a fake docker: its command lines, and the results of the processes that it runs."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from slime.agent.sandbox import CommandFailed, Sandbox, SandboxError, SandboxGone, SandboxLimits, make_sandbox
from slime.agent.sandbox.container import ContainerSandbox
from slime.agent.sandbox.local import unavailable_reason
from slime.errors import UserError
from tests.agent.sandbox.boxes import alive, box, wait_until

LIMITS = SandboxLimits(memory_mb=512, processes=64, cpus=1.5, file_mb=8, disk_mb=32, output_kb=4, output_mb=1)


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "bin" / "docker"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -I {Path(__file__).parent / "fake_docker.py"} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("FAKE_DOCKER", str(tmp_path))
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/sbin:/usr/bin:/bin")
    return tmp_path


def record(docker: Path) -> list[list[str]]:
    return [json.loads(line) for line in (docker / "record").read_text().splitlines()]


def can_enter_networks() -> bool:
    """Return true for root on a machine with namespaces; elsewhere the tests check the sandbox's refusal."""
    return os.geteuid() == 0 and unavailable_reason("unshare") is None


def test_run_command_has_every_limit_and_no_network(docker: Path) -> None:
    sandbox = ContainerSandbox("docker", "task:1", limits=LIMITS, env={"A": "b c"}, visible=["/usr"])
    line = " ".join(sandbox.create_command()[1:])
    for part in (
        "run --rm --interactive --init", "--network none", "--cap-drop ALL", "--security-opt no-new-privileges",
        "--pids-limit 64", "--memory 512m --memory-swap 512m", "--cpus 1.5", "--ulimit fsize=8388608", "--env A=b c",
        "--mount type=bind,source=/usr,target=/usr,readonly", "--entrypoint /bin/sh task:1 -c",
    ):  # fmt: skip
        assert part in line


def test_container_runs_commands_transfers_files_and_enforces_limits(docker: Path) -> None:
    async def run() -> None:
        made = make_sandbox("docker", image="task:1", limits=LIMITS)
        assert isinstance(made, Sandbox)
        async with made as sandbox:
            assert await sandbox.exec("echo $WHAT; echo e >&2; exit 3", env={"WHAT": "x y"}) == (3, "x y\n", "e\n")
            assert await sandbox.exec(["echo", "a b"], user="agent") == (0, "a b\n", "")
            for seconds in (0.5, 5, 50):  # retry with a longer timeout if the command had not begun
                mark, before = f"container-{os.urandom(8).hex()}", len(record(docker))
                line = f"(setsid sleep 600 &) ; echo '[\"begun\"]' >> {docker}/record; sleep 600"
                late = await sandbox.exec(line, env={"MARK": mark}, timeout=seconds)
                assert (late.code, late.cause) == (-1, "timeout")
                if record(docker)[before + 1] == ["begun"]:
                    break
            await asyncio.to_thread(wait_until, lambda: not alive(mark))
            endless = await sandbox.exec("yes")
            assert (endless.code, endless.cause, endless.truncated) == (-1, "output", True)
            assert len(endless.out) < 6000
            with pytest.raises(CommandFailed, match="exit code 4"):
                await sandbox.exec("exit 4", check=True)
            folder = docker / "deep"
            await sandbox.write_file(f"{folder}/it's a file", "text\n")
            assert await sandbox.read_file(f"{folder}/it's a file") == "text\n"
            with pytest.raises(FileNotFoundError, match="not a regular file"):
                await sandbox.read_file(str(folder))
        with pytest.raises(SandboxGone, match="is not running"):
            await sandbox.exec("true")

    if not can_enter_networks():
        assert os.geteuid() != 0 or box("unshare") is None
        return
    asyncio.run(run())
    lines = record(docker)
    assert lines[1][:6] == ["exec", "--interactive", "--user", "root", "--workdir", "/workspace"]
    assert lines[-1][0] == "kill"


def test_outside_endpoint_is_reachable_from_the_container_network(docker: Path) -> None:
    async def run() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"you said " + await reader.readline())
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, ContainerSandbox("docker", "task:1") as sandbox:
            base = await sandbox.reach(f"http://127.0.0.1:{port}/v1")
            assert base.endswith("/v1")
            inner = int(base.split(":")[2].split("/")[0])
            code = "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); s.sendall(b'hello\\n'); print(s.makefile().read())"
            assert (await sandbox.exec([sys.executable, "-I", "-c", code, str(inner)])).out == "you said hello\n\n"
            assert "refused" in (await sandbox.exec([sys.executable, "-I", "-c", code, str(port)])).err

    if not can_enter_networks():
        assert os.geteuid() != 0 or box("unshare") is None
        return
    asyncio.run(run())


def test_container_start_failures_are_reported(docker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with make_sandbox("docker", image="no-such-image"):
            pass

    with pytest.raises(SandboxError, match="docker could not start no-such-image: Unable to find image"):
        asyncio.run(run())
    with pytest.raises(UserError, match="--sandbox docker starts from an image: set --sandbox-image"):
        make_sandbox("docker")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="--sandbox podman needs the program podman, which is not installed"):
        make_sandbox("podman", image="x")
