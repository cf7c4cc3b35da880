"""Commands, files and pipes of local sandboxes."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.agent.sandbox import CommandFailed, Sandbox, SandboxError, SandboxGone, SandboxLimits, Snapshot, make_sandbox
from slime.agent.sandbox.host_sandbox import MachineSandbox, split_endpoint
from slime.errors import UserError
from tests.agent.sandbox.boxes import ALL, alive, inside, wait_until


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Short folder: a unix socket path has at most 108 bytes (104 on macOS), and pytest's folders are longer."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.parametrize("way", ALL)
def test_command_is_a_shell_line_or_a_list_of_words(way: str) -> None:
    async def use(sandbox: MachineSandbox) -> None:
        assert isinstance(sandbox, Sandbox)
        code, out, err = await sandbox.exec("echo one | tr o 0; echo two >&2; exit 3")
        assert (code, out, err) == (3, "0ne\n", "two\n")
        assert await sandbox.exec(["/bin/echo", "a b", "$HOME; x"]) == (0, "a b $HOME; x\n", "")
        missing = await sandbox.exec(["no-such-program"])
        assert missing.code == 127
        assert "No such file" in missing.err
        assert (await sandbox.exec("pwd")).out.strip() == sandbox.workdir
        assert (await sandbox.exec("kill -9 $$")).code == 137
        with pytest.raises(CommandFailed, match="exit code 4 of 'exit 4'") as failed:
            await sandbox.exec("exit 4", check=True)
        assert failed.value.outcome.code == 4
        with pytest.raises(ValueError, match="null character"):
            await sandbox.exec("echo \0")

    inside(way, use)


@pytest.mark.parametrize("way", ALL)
def test_driver_environment_is_not_passed_to_commands(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIME_TEST_SECRET", "not-for-agents")

    async def use(sandbox: MachineSandbox) -> None:
        lines = (await sandbox.exec("env", env={"TASK": "1 2"})).out.splitlines()
        assert "TASK=1 2" in lines
        assert "MODEL=tiny" in lines
        assert not [line for line in lines if "SECRET" in line]

    inside(way, use, env={"MODEL": "tiny"})


@pytest.mark.parametrize("way", ALL)
def test_files_and_daemons_persist_and_daemons_end_with_the_sandbox(way: str) -> None:
    mark = f"sandbox-daemon-{os.urandom(8).hex()}"

    async def use(sandbox: MachineSandbox) -> None:
        line = f"echo kept > note; MARK={mark} setsid nohup sleep 600 >/dev/null 2>&1 & echo started"
        assert (await sandbox.exec(line)).out == "started\n"
        assert (await sandbox.exec("cat note")).out == "kept\n"
        await asyncio.to_thread(wait_until, lambda: bool(alive(mark)))

    inside(way, use)
    assert alive(mark) == []


@pytest.mark.parametrize("way", ALL)
def test_files_are_written_and_read_back(way: str, tmp_path: Path) -> None:
    script = tmp_path / "tool.sh"
    script.write_text("#!/bin/sh\necho tool\n")
    script.chmod(0o755)

    async def use(sandbox: MachineSandbox) -> None:
        await sandbox.write_file("deep/er/text.txt", "grün\n")
        assert await sandbox.read_file("deep/er/text.txt") == "grün\n"
        large = os.urandom(3_000_000)
        await sandbox.write_file(f"{sandbox.workdir}/large", large)
        assert await sandbox.read_bytes("large") == large
        await sandbox.write_file("large", b"short")
        assert await sandbox.read_bytes("large") == b"short"
        await sandbox.write_file("~/tool.sh", script)
        assert (await sandbox.exec("~/tool.sh")).out == "tool\n"
        with pytest.raises(FileNotFoundError, match="cannot read missing in sandbox"):
            await sandbox.read_file("missing")
        await sandbox.exec("mkfifo pipe")
        for operation in (sandbox.read_file("pipe"), sandbox.write_file("pipe", "x")):
            with pytest.raises((SandboxError, OSError), match="pipe"):
                await operation

    inside(way, use)


@pytest.mark.parametrize("way", ALL)
def test_popen_streams_through_pipes_and_can_be_killed(way: str) -> None:
    async def use(sandbox: MachineSandbox) -> None:
        process = await sandbox.popen(["sh", "-c", 'while read line; do echo "got $line"; done; exit 5'])
        for word in (b"one", b"two"):
            process.stdin.write(word + b"\n")
            assert await process.stdout.readline() == b"got " + word + b"\n"
        process.stdin.close()
        assert await process.wait() == 5
        endless = await sandbox.popen(["sleep", "600"])
        await endless.kill()
        assert await endless.wait() == -1
        failed = await sandbox.popen(["no-such-program"])
        assert await failed.wait() == 127
        assert "No such file" in failed.error

    inside(way, use)


@pytest.mark.parametrize("way", ALL)
def test_cancelled_command_ends(way: str) -> None:
    mark = f"sandbox-cancel-{os.urandom(8).hex()}"

    async def use(sandbox: MachineSandbox) -> None:
        task = asyncio.create_task(sandbox.exec(f"echo > begun; MARK={mark} sleep 600; true"))
        await sandbox.exec("until test -e begun; do sleep 0.01; done")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(wait_until, lambda: not alive(mark))

    inside(way, use, limits=SandboxLimits(grace_seconds=0.1))


@pytest.mark.parametrize("way", ALL)
def test_outside_endpoint_is_reachable_from_the_sandbox(way: str, short_folder: Path) -> None:
    path = str(short_folder / "s")

    async def use(sandbox: MachineSandbox) -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            line = await reader.readline()
            writer.write(b"you said " + line)
            writer.close()

        unix = await asyncio.start_unix_server(answer, path)
        tcp = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = tcp.sockets[0].getsockname()[1]
        async with unix, tcp:
            for endpoint, path_inside in ((path, ""), (f"http://127.0.0.1:{port}/v1/", "/v1")):
                base = await sandbox.reach(endpoint)
                assert base == await sandbox.reach(endpoint)
                host, _, rest = base.removeprefix("http://").partition(":")
                inner, slash, tail = rest.partition("/")
                assert (host, slash + tail) == ("127.0.0.1", path_inside)
                code = f"import socket; s = socket.create_connection(('127.0.0.1', {inner})); s.sendall(b'hello\\n'); print(s.makefile().read(), end='')"
                assert await sandbox.exec([sandbox.python, "-I", "-c", code]) == (0, "you said hello\n", "")

    inside(way, use)


@pytest.mark.parametrize("way", ALL)
def test_listener_accepts_connections_from_inside_the_sandbox(way: str) -> None:
    async def use(sandbox: MachineSandbox) -> None:
        listener = await sandbox.listen()
        address = listener.getsockname()
        code = f"import socket; s = socket.create_connection({address!r}); print(s.recv(9).decode())"
        task = asyncio.create_task(sandbox.exec([sandbox.python, "-I", "-c", code]))
        listener.setblocking(False)
        with listener:
            peer, _ = await asyncio.get_running_loop().sock_accept(listener)
        with peer:
            peer.send(b"good day")
        assert (await task).out == "good day\n"

    inside(way, use)


def test_commands_before_start_or_after_end_raise() -> None:
    async def run() -> None:
        sandbox = make_sandbox("subprocess")
        with pytest.raises(SandboxError, match="is not started"):
            await sandbox.exec("true")
        async with sandbox:
            pass
        with pytest.raises(SandboxGone, match="has ended"):
            await sandbox.exec("true")

    asyncio.run(run())


def test_rejects_bad_kinds_limits_snapshots_and_endpoints(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no sandbox 'jail': choose one of auto, local, subprocess"):
        make_sandbox("jail")
    with pytest.raises(UserError, match="the limit memory_mb of a sandbox must be more than 0, not 0"):
        SandboxLimits(memory_mb=0)
    with pytest.raises(UserError, match=r"there is no folder .*/none to start sandboxes from"):
        Snapshot(tmp_path / "none")
    with pytest.raises(SandboxError, match="'ftp://x' cannot be reached from a sandbox"):
        split_endpoint("ftp://x")


def test_unix_addresses_are_distinguished_from_urls() -> None:
    assert split_endpoint("/run/api.sock") == ("/run/api.sock", "")
    assert split_endpoint("unix:///run/api.sock") == ("/run/api.sock", "")
    assert split_endpoint("http://[::1]:80/a/b/") == ("[::1]:80", "/a/b")
