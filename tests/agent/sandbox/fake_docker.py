"""A stand-in for docker that keeps a record of its command lines and really runs things, in a network of their own.

`run` starts a process in new namespaces where that is allowed and runs the image's "container" there; `exec` enters
them; `inspect` and `kill` are what they are. The folder in FAKE_DOCKER holds the record and the pids.
"""

import json
import os
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


def main() -> int:
    command, *words = sys.argv[1:]
    with (HERE / "record").open("a") as record:
        record.write(json.dumps(sys.argv[1:]) + "\n")
    given, rest = options(words)
    environment = {"PATH": os.environ["PATH"], "FAKE_DOCKER": str(HERE)}
    environment |= dict(pair.split("=", 1) for pair in given.get("--env", []))
    if command == "run":
        if rest[0] == "no-such-image":
            print("Unable to find image 'no-such-image' locally", file=sys.stderr)
            return 125
        line = f"mkdir -p {HERE}/workspace; ip link set lo up; echo $$ > {HERE}/pid; echo ready; exec cat"
        return subprocess.run(
            ["unshare", "--net", "--kill-child", "/bin/sh", "-c", line], env=environment, check=False
        ).returncode
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
