"""`local`: a throw-away user in namespaces of its own, whose root folder holds the system and nothing else of the host.

Bubblewrap enters the namespaces where it is installed, our own init otherwise; what is inside is the same. As root each
sandbox has a user id that nobody else has; as another user a user namespace takes its place.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slime.agent.sandbox.host_sandbox import MachineSandbox
from slime.agent.sandbox.inside import fd_messages
from slime.agent.sandbox.monitor_client import HERE, Box, ForkServer, python_command
from slime.agent.sandbox.protocol import SandboxLimits, Snapshot
from slime.errors import UserError

WORKDIR = "/workspace"
HOME = "/home/agent"
INNER_UID = 1000
"""Of a sandbox whose user is in truth the one that started it."""
_FIRST_UID = 1 << 30
_PROBE_S = 20.0
_CAP_SYS_ADMIN = 21
_OLDEST_BUBBLEWRAP = (0, 8)
_BUBBLEWRAP = (
    "--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--disable-userns", "--die-with-parent",
    "--as-pid-1", "--new-session",
)  # fmt: skip
_FILES = {
    "/etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "/etc/hostname": "sandbox\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "/etc/resolv.conf": "nameserver 127.0.0.1\noptions timeout:1 attempts:1\n",
}
"""Names are not resolved; a program that tries is told so after a second, not after five for each name."""


class LocalSandbox(MachineSandbox):
    """A sandbox that nothing gets out of but by the endpoints it was given."""

    kind = "local"
    boundary = True
    own_processes = True

    def __init__(
        self,
        *,
        limits: SandboxLimits | None = None,
        files: Snapshot | None = None,
        env: Mapping[str, str] | None = None,
        visible: Sequence[str | Path] = (),
        devices: Sequence[str | Path] = (),
        via: str = "auto",
        server: ForkServer | None = None,
    ) -> None:
        super().__init__(limits=limits, files=files, env=env, visible=visible, devices=devices, server=server)
        self.workdir, self.home = WORKDIR, HOME
        via = "unshare" if server is not None else via  # bubblewrap would execute another Python
        self.via = choose_via(via, root_file_system=files is not None and files.root)

    @property
    def python(self) -> str:
        """An interpreter that commands can use."""
        whole = self.files is not None and self.files.root
        return "python3" if whole else os.path.realpath(sys.executable)

    @property
    def unenforced(self) -> tuple[str, ...]:
        """The limits that hold for each process and not, as asked, for all of them together."""
        return tuple(limit for limit in self.limits.of_the_group() if limit not in self.held)

    @property
    def filtered(self) -> bool:
        """Whether the kernel filters the system calls of what runs inside."""
        return self.box.filtered

    def _make_box(self) -> Box:
        spec = jail_spec(self.limits, self.files, self.visible, self.via, self.devices)
        if self.files is not None and self.files.root:
            self._placed = [path.lstrip("/") for path in (*spec["jail"]["files"], *spec["jail"]["visible"])]
        return Box(spec, self.sandbox_id, self.server)


def jail_spec(
    limits: SandboxLimits, files: Snapshot | None, visible: Sequence[str], via: str, devices: Sequence[str] = ()
) -> dict[str, Any]:
    """What the monitor is told to build."""
    rootless = not _is_privileged()
    uid = INNER_UID if rootless else throw_away_uid()
    whole = files is not None and files.root
    seen = [] if whole else [*interpreter_folders(), *([str(HERE / "inside")] if via == "bwrap" else [])]
    walls = {
        "rootless": rootless,
        "uid": uid,
        "file_uid": uid,
        "disk_mb": limits.disk_mb,
        "inodes": max(10_000, limits.disk_mb * 256),
        "snapshot": None if files is None else {"path": os.path.realpath(files.path), "root": whole, "how": files.how},
        "visible": sorted({path for path in (*seen, *visible) if whole or not path.startswith("/usr/")}),
        "devices": list(devices),
        "home": HOME,
        "workdir": WORKDIR,
        "files": {**_FILES, **accounts(uid, files)},
        "bwrap": None,
        "bwrap_end": [],
    }
    if via == "bwrap":
        walls["bwrap"] = [shutil.which("bwrap") or "bwrap", *_BUBBLEWRAP, "--uid", str(uid), "--gid", str(uid)]
        walls["bwrap_end"] = [
            "--proc",
            "/proc",
            "--remount-ro",
            "/",
            "--chdir",
            "/",
            "--",
            *python_command("main_inside", str(HERE)),
        ]
    return {"jail": walls, "groups": limits.of_the_group(), "remove": None, "lower": None}


def _is_privileged() -> bool:
    """Whether this is a root that may make namespaces; that of a container often is another user in this respect."""
    if os.geteuid() != 0:
        return False
    with open("/proc/self/status") as lines:
        effective = next((int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")), 0)
    return bool(effective >> _CAP_SYS_ADMIN & 1)


def throw_away_uid() -> int:
    """A user id that no account has, nor, but for a chance of one in a billion, another sandbox."""
    with open("/proc/self/uid_map") as lines:
        most = max(int(inner) + int(count) for inner, _, count in (line.split() for line in lines))
    first = min(_FIRST_UID, most // 2)  # a container may have few of them
    return first + secrets.randbelow(max(1, min(most, 2 * _FIRST_UID) - first))


def interpreter_folders() -> list[str]:
    """Where this Python is; its site packages of a virtual environment are not."""
    return [os.path.realpath(sys.base_prefix)] if os.path.realpath(sys.base_prefix) != "/usr" else []


def accounts(uid: int, files: Snapshot | None) -> dict[str, str]:
    """The sandbox's own passwd and group: those of the root file system, if it brings some, and the agent's."""
    users, groups = "root:x:0:0:root:/root:/bin/sh\n", "root:x:0:\n"
    if files is not None and files.root:
        users, groups = (
            _plain_text(files.path / "etc" / name) or text for name, text in (("passwd", users), ("group", groups))
        )
    return {
        "/etc/passwd": f"{users.rstrip()}\nagent:x:{uid}:{uid}:agent:{HOME}:/bin/sh\n",
        "/etc/group": f"{groups.rstrip()}\nagent:x:{uid}:\n",
    }


def _plain_text(path: Path) -> str | None:
    return path.read_text() if path.is_file() and not path.is_symlink() else None


def choose_via(via: str, *, root_file_system: bool = False) -> str:
    """Who enters the namespaces: `bwrap` or `unshare`; UserError, in one sentence, where neither can."""
    if via == "auto":
        via = "unshare" if root_file_system or refusal("bwrap") is not None else "bwrap"
    why = refusal(via)
    if why is not None:
        raise UserError(
            f"this machine has no local sandbox: {why}; allow namespaces (docs/sandboxes.md says how), use --sandbox "
            "docker, podman or e2b or, only for code that you trust, --sandbox subprocess, which is no boundary"
        )
    if via == "bwrap" and root_file_system:
        raise UserError("a root file system as a snapshot is entered by unshare: bubblewrap would need a Python in it")
    return via


@functools.cache
def refusal(via: str) -> str | None:
    """Why sandboxes cannot be made this way here, in a few words; None if they can, which is tried once."""
    if not sys.platform.startswith("linux"):
        return f"namespaces are Linux's, and this is {sys.platform}"
    if via == "bwrap":
        if not _is_privileged():
            return "bubblewrap is used as root; other users enter the namespaces themselves"
        if (path := shutil.which("bwrap")) is None:
            return "bubblewrap is not installed"
        text = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
        version = re.search(r"(\d+)\.(\d+)", text)
        if version is None or tuple(map(int, version.groups())) < _OLDEST_BUBBLEWRAP:
            return f"bubblewrap {text.split()[-1] if text else '?'} is older than 0.8"
    elif os.uname().machine not in ("x86_64", "aarch64"):
        return f"there are no numbers of system calls for {os.uname().machine}"
    return _tried(jail_spec(SandboxLimits(disk_mb=1), None, (), via))


def _tried(spec: Mapping[str, Any]) -> str | None:
    life, theirs = socket.socketpair()
    control, init_end = socket.socketpair()
    numbers = (theirs.fileno(), init_end.fileno())
    words = [*python_command("main", str(HERE)), *map(str, (*numbers, os.getpid()))]
    with life, control:
        process = subprocess.Popen(
            words,
            pass_fds=numbers,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={},
            cwd="/",
        )
        theirs.close()
        init_end.close()
        error = None
        for sock in (life, control):
            sock.settimeout(_PROBE_S)
        with contextlib.suppress(fd_messages.Broken, OSError):
            fd_messages.send(life, spec)
        for sock in (life, control):
            try:
                received = fd_messages.receive(sock)
            except (fd_messages.Broken, OSError):
                received = None
            if received is None:
                error = error or "its first process ended before it was ready"
            elif "error" in received[0]:
                error = str(received[0]["error"])
    _, said = process.communicate()
    lines = said.decode(errors="replace").strip().splitlines()
    return error and (f"{error} ({lines[-1]})" if lines else error)
