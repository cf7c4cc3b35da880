"""Child processes: a real driver script with children and grandchildren, ended in different ways."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.cluster.child_env import is_secret
from slime.cluster.process import ChildProcess, ProcessSet
from slime.cluster.rpc.channel import Channel, ChannelPoller, channel_pair
from tests.e2e.runs import wait_until

CHILD = """
import os, subprocess, sys, time, signal
if {stubborn}:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleeper = [sys.executable, "-c", "import signal,time; {ignore}time.sleep(600)"]
same_group = subprocess.Popen(sleeper)
own_session = subprocess.Popen(sleeper, start_new_session=True)
with open({pid_file!r} + ".tmp", "w") as out:
    print(os.getpid(), same_group.pid, own_session.pid, file=out)
os.rename({pid_file!r} + ".tmp", {pid_file!r})
time.sleep(600)
"""

DRIVER = """
import os, signal, sys, time
from pathlib import Path
from slime.cluster.process import ChildProcess, ProcessSet
processes = ProcessSet()
for i in range(2):
    processes.keep(ChildProcess(f"c{{i}}", [sys.executable, {child!r} + str(i) + ".py"], log_path={log!r}).start())
while not all(Path({pid_file!r} + str(i)).exists() for i in range(2)):
    time.sleep(0.02)
if {fork}:
    if (copy := os.fork()) == 0:
        os.close(1)
        time.sleep(600)
        os._exit(0)
    Path({pid_file!r} + "copy").write_text(str(copy))
print("ready", *[p.pid for p in processes], flush=True)
{end}
"""

ENDINGS = {
    "kill -9": "os.kill(os.getpid(), signal.SIGKILL)",
    "SIGTERM": "os.kill(os.getpid(), signal.SIGTERM)",
    "sys.exit": "sys.exit(3)",
    "exception": "raise RuntimeError('driver broke')",
    "os._exit": "os._exit(4)",
    "normal return": "pass",
}


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in (b"Z", b"X")


def wait_until_gone(pids: list[int]) -> list[int]:
    deadline = time.monotonic() + 120
    while (left := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)


def run_driver(tmp_path: Path, end: str, *, stubborn: bool = False, fork: bool = False) -> list[int]:
    """Run a driver to its end and return the pids of its guards, children and grandchildren."""
    pid_file = str(tmp_path / "pids")
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN);" if stubborn else ""
    for i in range(2):
        code = CHILD.format(pid_file=pid_file + str(i), stubborn=stubborn, ignore=ignore)
        (tmp_path / f"child{i}.py").write_text(code)
    script = DRIVER.format(
        child=str(tmp_path / "child"), log=str(tmp_path / "log"), pid_file=pid_file, end=end, fork=fork
    )
    driver = subprocess.run(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=240, check=False
    )
    words = driver.stdout.split()
    assert words[0] == b"ready"
    pids = [int(word) for word in words[1:]]
    for i in range(2):
        pids += [int(word) for word in Path(pid_file + str(i)).read_text().split()]
    assert len(pids) == 8
    return pids


@pytest.mark.parametrize("how", ENDINGS)
def test_no_process_survives_the_end_of_the_driver(tmp_path: Path, how: str) -> None:
    assert wait_until_gone(run_driver(tmp_path, ENDINGS[how])) == []


def test_children_that_ignore_sigterm_die_after_the_driver_is_killed(tmp_path: Path) -> None:
    assert wait_until_gone(run_driver(tmp_path, ENDINGS["kill -9"], stubborn=True)) == []


def test_forked_copy_of_the_driver_does_not_keep_children_alive(tmp_path: Path) -> None:
    pids = run_driver(tmp_path, ENDINGS["kill -9"], fork=True)
    copy = int((tmp_path / "pidscopy").read_text())
    assert wait_until_gone(pids) == []
    assert is_alive(copy)
    os.kill(copy, signal.SIGKILL)


@pytest.fixture
def log_path(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "child.log"


def python(name: str, code: str, log_path: Path, **kw: object) -> ChildProcess:
    return ChildProcess(name, [sys.executable, "-c", code], log_path=log_path, **kw)  # type: ignore[arg-type]


@pytest.mark.parametrize(("code", "expected"), [("0", 0), ("2", 2), ("137", 137)])
def test_exit_code_is_that_of_the_child(log_path: Path, code: str, expected: int) -> None:
    process = python("exits", f"raise SystemExit({code})", log_path).start()
    assert process.wait(120) == expected
    assert process.poll() == expected
    assert process.stop() == expected


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_death_by_signal_is_a_negative_exit_code(log_path: Path, signum: int) -> None:
    process = python("dies", f"import os; os.kill(os.getpid(), {int(signum)})", log_path).start()
    assert process.wait(120) == -signum


def test_output_goes_to_the_log_and_tail_reads_its_end(log_path: Path) -> None:
    code = "import sys\nfor i in range(50): print('line', i)\nprint('last words', file=sys.stderr)"
    process = python("talks", code, log_path).start()
    assert process.wait(120) == 0
    assert process.tail(3) == "line 48\nline 49\nlast words"
    assert len(process.tail(1000).splitlines()) == 51


def test_output_is_visible_while_the_child_runs(log_path: Path) -> None:
    with python("talks", "import time; print('hello'); time.sleep(600)", log_path) as process:
        assert wait_until(lambda: process.tail() == "hello", 120)
        assert process.poll() is None
        process.stop(grace_s=120)
    assert process.poll() == -signal.SIGTERM


def test_missing_program_is_reported_in_the_log(log_path: Path) -> None:
    process = ChildProcess("nothing", ["/no/such/program"], log_path=log_path).start()
    assert process.wait(120) == 127
    assert process.tail() == "error: cannot start /no/such/program: No such file or directory"


def test_stop_sends_sigterm_and_lets_the_child_finish(log_path: Path, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    code = (
        "import pathlib,signal,sys,time\n"
        "def bye(*_): print('tidied up'); sys.exit(7)\n"
        f"signal.signal(signal.SIGTERM, bye); pathlib.Path({str(ready)!r}).touch(); time.sleep(600)"
    )
    process = python("tidy", code, log_path).start()
    wait_for(ready)
    assert process.stop(grace_s=120) == 7
    assert process.tail() == "tidied up"
    assert process.stop() == 7


def test_stop_kills_children_that_ignore_sigterm_and_their_children(log_path: Path, tmp_path: Path) -> None:
    pid_file = tmp_path / "pids"
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    process = python("stubborn", CHILD.format(pid_file=str(pid_file), stubborn=True, ignore=ignore), log_path).start()
    wait_for(pid_file)
    pids = [int(word) for word in pid_file.read_text().split()]
    assert set(pids) < set(process.pids())
    assert process.stop(grace_s=0.2) == -signal.SIGKILL
    assert wait_until_gone(pids) == []
    assert process.pids() == []


def test_killing_the_guard_ends_child_and_grandchildren(log_path: Path, tmp_path: Path) -> None:
    pid_file = tmp_path / "pids"
    code = CHILD.format(pid_file=str(pid_file), stubborn=False, ignore="")
    process = python("victim", code, log_path).start()
    wait_for(pid_file)
    child, same_group, own_session = (int(word) for word in pid_file.read_text().split())
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(120) == -signal.SIGKILL
    assert wait_until_gone([child, same_group, own_session]) == []


DAEMON = """
import os, sys, time
started, write = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(write, b"%d" % os.getpid())
        time.sleep(600)
    os._exit(0)
os.wait()
print(os.getpid(), os.read(started, 20).decode(), flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has child subreapers")
@pytest.mark.parametrize("victim", ["guard", "deputy"])
def test_daemons_of_a_child_end_if_guard_or_deputy_is_killed(log_path: Path, victim: str) -> None:
    process = python("daemons", DAEMON, log_path).start()
    assert wait_until(lambda: process.tail().count(" ") == 1, 120)
    child, daemon = (int(word) for word in process.tail().split())
    guard, deputy, *below = process.pids()
    assert (guard, sorted(below)) == (process.pid, sorted([child, daemon]))
    os.kill(guard if victim == "guard" else deputy, signal.SIGKILL)
    assert process.wait(120) == -signal.SIGKILL
    assert wait_until_gone([guard, deputy, child, daemon]) == []


def test_grandchildren_are_killed_after_the_child_exits(log_path: Path, tmp_path: Path) -> None:
    pid_file = tmp_path / "pids"
    code = CHILD.format(pid_file=str(pid_file), stubborn=False, ignore="").replace(
        "time.sleep(600)\n", "raise SystemExit(5)\n"
    )
    process = python("leaves", code, log_path).start()
    assert process.wait(120) == 5
    _, same_group, own_session = (int(word) for word in pid_file.read_text().split())
    assert wait_until_gone([same_group, own_session]) == []


def test_control_pipes_do_not_leak_into_other_children(log_path: Path) -> None:
    listing = "import os,time; print(sorted(os.listdir('/proc/self/fd')), flush=True); time.sleep(600)"
    with ProcessSet() as processes:
        first = processes.keep(python("first", "import time; time.sleep(600)", log_path.with_name("first.log")).start())
        second = processes.keep(python("second", listing, log_path).start())
        assert wait_until(lambda: bool(second.tail()), 120)
        assert second.tail() == "['0', '1', '2', '3']"  # 3 is the descriptor of the listing
        assert list(processes) == [first, second]
        assert first.poll() is None
    assert first.poll() is not None
    assert second.poll() is not None


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """Occupy all descriptors below 1,100, as in a driver with that many connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    taken = []
    while not taken or taken[-1] < 1100:
        taken.append(os.dup(0))
    try:
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_driver_with_many_descriptors_starts_and_stops_children(log_path: Path, many_descriptors: None) -> None:
    process = python("high", "import time; print('up', flush=True); time.sleep(600)", log_path).start()
    assert wait_until(lambda: process.tail() == "up", 120)
    assert process.stop(grace_s=120) == -signal.SIGTERM
    assert process.tail() == "up"  # the guard wrote no traceback


def test_listening_polls_channels_with_high_descriptors(many_descriptors: None) -> None:
    pairs = [channel_pair() for _ in range(3)]
    ours = [channel for channel, _ in pairs]
    assert min(channel.fileno() for channel in ours) > 1100
    listening = ChannelPoller(ours)
    assert listening.ready(0.0) == []
    Channel(pairs[2][1]).send("news")
    pairs[0][1].close()
    assert listening.ready(60.0) == [0, 2]
    listening.without(0)
    assert listening.ready(60.0) == [2]
    assert ours[2].recv(60.0) == "news"
    for channel in ours:
        channel.close()


def test_child_environment_extends_that_of_the_driver(log_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIME_TEST_KEPT", "kept")
    code = "import os; print(os.environ['SLIME_TEST_KEPT'], os.environ['SLIME_TEST_NEW'])"
    process = python("env", code, log_path, env={"SLIME_TEST_NEW": "new"}).start()
    assert process.wait(120) == 0
    assert process.tail() == "kept new"


def test_child_gets_secrets_only_if_they_are_passed_on(log_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SESSION_TOKEN", "MY_SECRET_THING"):
        monkeypatch.setenv(name, f"of {name}")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    code = "import json,os; print(json.dumps(dict(os.environ)))"
    process = python("secrets", code, log_path, env={"OWN_KEY": "given"}, pass_env=["HF_TOKEN"]).start()
    assert process.wait(120) == 0
    found = json.loads(process.tail())
    assert (found["HF_TOKEN"], found["OWN_KEY"], found["TOKENIZERS_PARALLELISM"]) == ("of HF_TOKEN", "given", "false")
    assert not {"WANDB_API_KEY", "AWS_SESSION_TOKEN", "MY_SECRET_THING"} & found.keys()


@pytest.mark.parametrize(
    ("is_one", "names"),
    [
        (
            True,
            "HF_TOKEN HUGGING_FACE_HUB_TOKEN WANDB_API_KEY OPENAI_API_KEY AWS_ACCESS_KEY_ID AWS_PROFILE GITHUB_TOKEN "
            "KAGGLE_KEY PGPASSWORD MYSQL_PWD DB_PASSWORD client_secret GOOGLE_APPLICATION_CREDENTIALS SSH_AUTH_SOCK",
        ),
        (
            False,
            "PATH HOME PWD OLDPWD TOKENIZERS_PARALLELISM MAX_TOKENS_PER_GPU KEYBOARD CUDA_VISIBLE_DEVICES HF_HOME "
            "NCCL_SOCKET_IFNAME PYTHONPATH TORCHINDUCTOR_CACHE_DIR XDG_SESSION_ID TRITON_KEY_CACHE PATRON",
        ),
    ],
)
def test_secret_variables_are_recognized_by_name(is_one: bool, names: str) -> None:
    assert {name: is_secret(name) for name in names.split()} == dict.fromkeys(names.split(), is_one)


def test_process_set_stops_in_reverse_order(tmp_path: Path) -> None:
    order = tmp_path / "order"
    code = (
        "import signal,sys,time\n"
        "def bye(*_):\n    open({order!r},'a').write({name!r}+' '); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, bye); print('up', flush=True); time.sleep(600)"
    )
    with ProcessSet() as processes:
        started = [
            processes.keep(python(name, code.format(order=str(order), name=name), tmp_path / f"{name}.log").start())
            for name in ("a", "b", "c")
        ]
        for process in started:
            assert wait_until(lambda one=process: one.tail() == "up", 120)
        processes.stop(grace_s=120)
    assert order.read_text() == "c b a "


def test_starting_twice_is_rejected(log_path: Path) -> None:
    with python("once", "import time; time.sleep(600)", log_path) as process, pytest.raises(RuntimeError, match="once"):
        process.start()


def test_stop_right_after_start_ends_the_child_by_sigterm(log_path: Path) -> None:
    for _ in range(5):
        assert python("brief", "import time; time.sleep(600)", log_path).start().stop(grace_s=120) == -signal.SIGTERM
