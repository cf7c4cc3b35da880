"""Fake `docker` that records its command lines and runs real processes in a separate network namespace.

`run` starts the first process of the "container" in a new network namespace; `exec` enters that namespace; `inspect`
prints the process id and `kill` ends the process. The folder in FAKE_DOCKER holds the record and the process id.
"""

import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

HERE = Path(os.environ["FAKE_DOCKER"])
TAKES_VALUE = (
    "--name", "--network", "--cap-drop", "--security-opt", "--pids-limit", "--memory", "--memory-swap", "--ulimit",
    "--tmpfs", "--cpus", "--mount", "--env", "--entrypoint", "--user", "--workdir", "--format",
)  # fmt: skip


def options(words: list[str]) -> tuple[dict[str, list[str]], list[str]]:
    found: dict[str, list[str]] = {}
    while words and words[0].startswith("--"):
        word = words.pop(0)
        found.setdefault(word, []).append(words.pop(0) if word in TAKES_VALUE else "")
    return found, words


def first_process() -> None:
    """First process of the container: brings up the loopback interface and runs until its standard input ends."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, 0x8914, struct.pack("16sh22x", b"lo", 1))
    (HERE / "workspace").mkdir(exist_ok=True)
    (HERE / "pid").write_text(str(os.getpid()))
    print("ready", flush=True)
    os.execvp("cat", ["cat"])


def main() -> int:
    command, *words = sys.argv[1:]
    if command == "first-process":
        first_process()
    with (HERE / "record").open("a") as record:
        record.write(json.dumps(sys.argv[1:]) + "\n")
    given, rest = options(words)
    environment = {"PATH": os.environ["PATH"], "FAKE_DOCKER": str(HERE)}
    environment |= dict(pair.split("=", 1) for pair in given.get("--env", []))
    if command == "run":
        if rest[0] == "no-such-image":
            print("Unable to find image 'no-such-image' locally", file=sys.stderr)
            return 125
        first = ["unshare", "--net", "--kill-child", sys.executable, "-I", __file__, "first-process"]
        return subprocess.run(first, env=environment, check=False).returncode
    if command == "inspect":
        print((HERE / "pid").read_text().strip())
        return 0
    if command == "kill":
        os.kill(int((HERE / "pid").read_text()), 9)
        return 0
    pid = (HERE / "pid").read_text().strip()
    enter = ["nsenter", "--target", pid, "--net"]
    return subprocess.run([*enter, *rest[1:]], env=environment, cwd=HERE / "workspace", check=False).returncode


if __name__ == "__main__":
    code = main()
    sys.exit(code if code >= 0 else 128 - code)
