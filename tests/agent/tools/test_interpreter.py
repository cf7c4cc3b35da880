"""Python interpreter tool: variables persist for one attempt, and code can fail only its own call."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from slime.agent.sandbox.local import unavailable_reason
from slime.agent.sandbox.registry import warn_without_boundary
from slime.agent.tools import PythonInterpreter, ToolBox, ToolEnvironment, ToolOutcome, ToolResult
from slime.agent.tools.interpreter import SandboxStarter
from slime.errors import UserError
from tests.agent.sandbox.boxes import alive, wait_until

PATIENCE_S = 60.0


def interpreter(**options: Any) -> PythonInterpreter:
    return PythonInterpreter(**{"timeout_s": PATIENCE_S, **options})


def in_box(work: Callable[[ToolBox], Awaitable[Any]], **options: Any) -> Any:
    async def main() -> Any:
        environment = ToolEnvironment([interpreter(**{"spare": 0, "sandbox": "subprocess", **options})])
        try:
            async with environment.open() as box:
                return await work(box)
        finally:
            await environment.aclose()

    return asyncio.run(main())


def run(*pieces: str, **options: Any) -> list[ToolResult]:
    async def work(box: ToolBox) -> list[ToolResult]:
        return [await box.call("python", {"code": code}) for code in pieces]

    return in_box(work, **options)


def outcomes(*pieces: str, **options: Any) -> list[tuple[str, str]]:
    return [(result.outcome.value, result.text) for result in run(*pieces, **options)]


def test_variables_persist_and_the_last_value_is_shown() -> None:
    assert outcomes("x = 6 * 7", "x", "print(x)\nx + 1", "_ * 2", "def f(n):\n  return n * x\nf(2)", "None") == [
        ("ok", ""),
        ("ok", "42"),
        ("ok", "42\n43"),
        ("ok", "86"),
        ("ok", "84"),
        ("ok", ""),
    ]


def test_errors_have_tracebacks_and_keep_the_variables() -> None:
    results = outcomes("x = 1", "def f():\n    return x / 0\nprint('so far')\nf()", "1 +", "import nothing_here", "x")
    assert results[1] == (
        "error",
        "Error: so far\nline 4, in <module>\nline 2, in f\nZeroDivisionError: division by zero",
    )
    assert results[2][0] == "error"
    assert results[2][1].endswith("SyntaxError: invalid syntax")
    assert results[3] == (
        "error",
        "Error: line 1, in <module>\nModuleNotFoundError: No module named 'nothing_here'",
    )
    assert results[4] == ("ok", "1")


@pytest.mark.parametrize(
    ("code", "outcome", "text"),
    [
        ("raise SystemExit", "ok", ""),
        ("import sys; sys.exit('no')", "error", "Error: SystemExit: no"),
        ("input()", "error", "EOFError: EOF when reading a line"),
        ("raise KeyboardInterrupt", "error", "KeyboardInterrupt"),
        ("def f(): f()\nf()", "error", "RecursionError: maximum recursion depth exceeded"),
        ("print('a', file=__import__('sys').stderr)", "ok", "a"),
        ("import os; os.system('echo from a child')", "ok", "0\nfrom a child"),
        ("import os; os.write(1, b'raw')", "ok", "3\nraw"),
    ],
)
def test_result_has_the_output_or_error_of_the_code(code: str, outcome: str, text: str) -> None:
    [first, second] = outcomes(code, "'still here'")
    assert first[0] == outcome
    assert first[1].endswith(text)
    assert second == ("ok", "'still here'")


async def run_call(box: ToolBox, code: str, timeout_s: float = PATIENCE_S) -> tuple[str, str]:
    """Run one call with its own timeout; return its outcome and text."""
    attempt: Any = box._tools["python"]
    attempt._timeout_s = timeout_s
    result = await box.call("python", {"code": code})
    return result.outcome.value, result.text


def test_timed_out_code_is_interrupted_and_variables_persist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime.agent.tools.interpreter.GRACE_S", PATIENCE_S)

    async def work(box: ToolBox) -> None:
        assert await run_call(box, "x = 5") == ("ok", "")
        for timeout_s in (0.5, 5, 50):  # retry with more time if the code had not begun
            outcome, text = await run_call(box, "print('began')\nwhile True: pass", timeout_s)
            if "began" in text:
                break
        assert outcome == "timeout"
        assert text == f"Error: began\nthe code took longer than {timeout_s} s and was interrupted"
        assert await run_call(box, "x") == ("ok", "5")

    in_box(work)


def test_uninterruptible_code_is_killed_and_the_restart_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    deaf = "import signal\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\nwhile True: pass"

    async def work(box: ToolBox) -> None:
        for timeout_s in (0.3, 3, 30):  # retry with more time if the code was interrupted before it ignored SIGALRM
            monkeypatch.setattr("slime.agent.tools.interpreter.GRACE_S", PATIENCE_S)
            assert (await run_call(box, "x = 5"))[0] == "ok"
            monkeypatch.setattr("slime.agent.tools.interpreter.GRACE_S", 0.2)
            outcome, text = await run_call(box, deaf, timeout_s)
            if not text.endswith("and was interrupted"):
                break
        monkeypatch.setattr("slime.agent.tools.interpreter.GRACE_S", PATIENCE_S)
        assert outcome == "timeout"
        assert text == f"Error: the code took longer than {timeout_s} s and the interpreter was killed"
        assert await run_call(box, "x") == (
            "error",
            "Error: (the interpreter was restarted: variables are lost)\nline 1, in <module>\n"
            "NameError: name 'x' is not defined",
        )
        assert await run_call(box, "1") == ("ok", "1")

    in_box(work)


def test_interpreter_death_fails_only_its_call() -> None:
    assert outcomes("import os; os._exit(7)", "1 + 1") == [
        ("crashed", "Error: the interpreter died during the call (exit code 7)"),
        ("ok", "(the interpreter was restarted: variables are lost)\n2"),
    ]


def test_writing_to_the_protocol_pipe_fails_only_its_call() -> None:
    code = "import os\nfor fd in range(3, 20):\n  try: os.write(fd, b'[1]\\n')\n  except OSError: pass\n"
    [first, second] = outcomes(code, "2 + 2")
    assert first[0] == "crashed"
    assert second == ("ok", "(the interpreter was restarted: variables are lost)\n4")


def test_output_is_bounded_while_it_is_printed() -> None:
    [result, after] = outcomes("while True: print('spam')", "1", max_output_chars=1000, max_result_chars=100)
    assert result[0] == "too_much_output"
    assert result[1].endswith("the code printed more than 1000 characters")
    assert result[1].startswith("Error: spam\nspam\n")
    assert "characters left out" in result[1]
    assert len(result[1]) < 200
    assert after == ("ok", "1")
    [child] = outcomes("import os; _ = os.system('yes | head -c 100000')", max_output_chars=1000)
    assert child[0] == "too_much_output"


def test_memory_is_bounded() -> None:
    [first, second] = outcomes("x = bytearray(1 << 30)", "1", memory_mb=256)
    assert first == ("error", "Error: MemoryError: the memory of the interpreter is used up")
    assert second == ("ok", "1")


def test_attempts_are_isolated_and_calls_of_a_turn_run_in_order() -> None:
    async def main() -> None:
        environment = ToolEnvironment([interpreter(spare=1, sandbox="subprocess")])

        async def attempt(n: int) -> list[str]:
            async with environment.open() as box:
                await box.call("python", {"code": f"x = {n}"})
                from slime.agent.messages import ToolCall

                turn = [ToolCall(str(i), "python", '{"code": "x += 1; x"}') for i in range(3)]
                return [result.text for result in await box.run(turn)]

        assert await asyncio.gather(*(attempt(10 * n) for n in range(3))) == [
            ["1", "2", "3"],
            ["11", "12", "13"],
            ["21", "22", "23"],
        ]
        await environment.aclose()

    asyncio.run(main())


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


LEAVES = """
import ctypes, os, socket, subprocess, threading
import json as left_in_a_module; left_in_a_module.left = 1
places = ["/tmp", "/var/tmp", "/dev/shm", "/run", os.path.expanduser("~"), os.getcwd()]
seen = [name for place in places for name in os.listdir(place) if name.startswith("left")]
seen += ["module"] if threading.__dict__.get("left") else []
threading.left = 1
for place in places:
    try:
        open(f"{place}/left", "w").close()
    except OSError:
        pass
try:
    socket.socket(socket.AF_UNIX).connect("\\0left")
    seen.append("socket")
except OSError:
    pass
try:
    with open(f"/proc/{os.getppid()}/mem", "r+b"):
        seen.append("the memory of its parent")
except OSError:
    pass
libc = ctypes.CDLL(None)
seen += ["shared memory"] if libc.shmget(77, 4096, 0o666) >= 0 else []
libc.shmget(77, 4096, 0o1666)
code = "import socket, time; s = socket.socket(socket.AF_UNIX); s.bind('\\\\0left'); s.listen(); print(flush=True); time.sleep(1000)"
import sys
left = subprocess.Popen([sys.executable, "-I", "-c", code, MARK], stdout=subprocess.PIPE, start_new_session=True)
left.stdout.readline()
full = False
for part in "ab":  # one file may not have all the room
    try:
        with open(f"/dev/shm/left-{part}", "wb") as fill:
            while True:
                fill.write(bytes(1 << 20))
    except OSError as error:
        full = error.errno == 28
(seen, full)
"""


def test_attempt_finds_and_leaves_no_traces_on_the_machine() -> None:
    """Covers files, a full disk, modules, sockets, shared memory, processes, and the memory of the parent."""
    if (why := unavailable_reason("unshare")) is not None:
        with pytest.raises(UserError, match="this machine has no local sandbox"):
            interpreter(sandbox="local")
        assert why
        return
    mark = f"interpreter-{os.urandom(8).hex()}"

    async def main() -> None:
        provider = interpreter(spare=1, sandbox="local")
        environment = ToolEnvironment([provider])
        for _ in range(2):
            async with environment.open() as box:
                result = await box.call("python", {"code": f"MARK = {mark!r}\n{LEAVES}"})
                assert result.text == "([], True)"
                assert alive(mark)
            await asyncio.gather(*provider._pool._ending)
            assert not alive(mark)
        server = provider._start._server._process
        await environment.aclose()
        assert server.poll() is not None

    asyncio.run(main())


def test_dead_fork_server_crashes_only_the_attempts_it_served() -> None:
    async def main() -> None:
        provider = interpreter(spare=2, sandbox="subprocess")
        environment = ToolEnvironment([provider])
        async with environment.open() as box:
            assert (await box.call("python", {"code": "1"})).text == "1"
            await asyncio.gather(*provider._pool._starting)
            server = provider._start._server._process
            server.kill()
            await asyncio.to_thread(server.wait)
            await asyncio.to_thread(wait_until, lambda: not any(worker.alive for worker in provider._pool._ready))
            assert (await box.call("python", {"code": "1"})).outcome is ToolOutcome.CRASHED
            assert (await box.call("python", {"code": "1"})).text.endswith("variables are lost)\n1")
        async with environment.open() as box:
            assert (await box.call("python", {"code": "2"})).text == "2"
        await environment.aclose()

    asyncio.run(main())


def test_pool_closed_right_after_an_attempt_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen: list[Path] = []

    async def work(box: ToolBox) -> None:
        await box.call("python", {"code": "1"})
        seen.extend(tmp_path.iterdir())  # noqa: ASYNC240

    in_box(work, spare=2)
    assert seen
    assert list(tmp_path.iterdir()) == []


def test_interpreter_needs_a_boundary_unless_the_run_waives_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("slime.agent.sandbox.local.unavailable_reason", lambda via: "unshare: Operation not permitted")
    warn_without_boundary.cache_clear()

    async def main() -> None:
        environment = ToolEnvironment([interpreter(spare=0)])
        with pytest.raises(
            UserError, match="this machine has no local sandbox: unshare: Operation not permitted; allow"
        ):
            async with environment.open():
                pass
        assert "not a security boundary" not in caplog.text
        environment.in_run("subprocess")
        async with environment.open() as box:
            assert (await box.call("python", {"code": "6 * 7"})).text == "42"
        await environment.aclose()

    asyncio.run(main())
    assert caplog.text.count("--sandbox subprocess is not a security boundary") == 1
    for sandbox in ("auto", "local"):
        with pytest.raises(UserError, match="this machine has no local sandbox"):
            interpreter(sandbox=sandbox)
    with pytest.raises(UserError, match="there is no sandbox 'docker' for an interpreter"):
        interpreter(sandbox="docker")


def test_sandboxed_code_cannot_reach_host_files_or_network(tmp_path: Path) -> None:
    if unavailable_reason("unshare") is not None:
        return  # refused, which the sandbox tests check
    secret = tmp_path / "secret"
    secret.write_text("x")
    reach = "import socket; socket.create_connection(('127.0.0.1', 22))"
    results = outcomes(
        "x = 6 * 7", "x", f"open({str(secret)!r})", reach, "import os; os._exit(3)", "1", sandbox="local"
    )
    assert results[:2] == [("ok", ""), ("ok", "42")]
    assert results[2][0] == results[3][0] == "error"
    assert "FileNotFoundError" in results[2][1] or "PermissionError" in results[2][1]
    assert "ConnectionRefusedError" in results[3][1]
    assert results[4] == ("crashed", "Error: the interpreter died during the call (exit code 3)")
    assert results[5] == ("ok", "(the interpreter was restarted: variables are lost)\n1")


def test_packages_are_importable_on_request() -> None:
    for sandbox in ("subprocess", "local") if unavailable_reason("unshare") is None else ("subprocess",):
        options: dict[str, Any] = {"sandbox": sandbox, "memory_mb": 2048}
        assert outcomes("import numpy; int(numpy.arange(4).sum())", packages=True, **options) == [("ok", "6")]


def test_failed_interpreter_start_is_a_crashed_outcome(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("slime.agent.sandbox.monitor_client.sys.executable", "/nowhere/python")
    [(outcome, text)] = outcomes("1")
    assert outcome == ToolOutcome.CRASHED
    assert text.startswith("Error: no interpreter could be started: [Errno 2] No such file or directory")
    monkeypatch.undo()
    ends_at_once = tmp_path / "program.py"
    ends_at_once.write_text("if __name__ == '__main__': raise SystemExit(5)")
    start = SandboxStarter(ends_at_once, "subprocess", memory_mb=256, packages=False)
    assert outcomes("1", start=start) == [("crashed", "Error: no interpreter could be started (exit code 5)")]


def test_rejects_arguments_other_than_code() -> None:
    async def work(box: ToolBox) -> list[str]:
        return [(await box.call("python", arguments)).text for arguments in ({}, {"code": 3}, {"code": "1", "x": 1})]

    assert in_box(work) == [
        "Error: arguments lack 'code'",
        "Error: code must be a string, not 3",
        "Error: there is no parameter 'x'; there are: code",
    ]
