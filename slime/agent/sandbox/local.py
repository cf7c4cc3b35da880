"""`local`: a temporary user in namespaces of its own, whose root folder shows only the system folders of the host.

Bubblewrap enters the namespaces where it is installed, our own init otherwise; the inside is the same. As root, each
sandbox gets a user id of its own; as another user, a user namespace is used instead.
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

from slime.agent.sandbox.host_sandbox import MachineSandbox
from slime.agent.sandbox.inside import fd_messages
from slime.agent.sandbox.monitor_client import HERE, ForkServer, MonitorClient, python_command
from slime.agent.sandbox.protocol import SandboxLimits, Snapshot
from slime.errors import UserError
from slime.storage.json_types import JsonMapping, JsonObject

WORKDIR = "/workspace"
HOME = "/home/agent"
INNER_UID = 1000
"""User id inside a sandbox whose user is, outside, the one that started it."""
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
"""Host names do not resolve; a lookup fails after one second instead of five for each name."""


class LocalSandbox(MachineSandbox):
    """A sandbox that is isolated from the host except for the endpoints it was given."""

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
        via = "unshare" if server is not None else via  # bubblewrap would start another Python
        self.via = choose_via(via, root_file_system=files is not None and files.root)

    @property
    def python(self) -> str:
        """Path of a Python interpreter that commands can use."""
        whole = self.files is not None and self.files.root
        return "python3" if whole else os.path.realpath(sys.executable)

    @property
    def unenforced(self) -> tuple[str, ...]:
        """Limits that are enforced for each process only, not for all processes together."""
        return tuple(limit for limit in self.limits.group_limits() if limit not in self.held)

    @property
    def filtered(self) -> bool:
        """True if the kernel filters the system calls of processes inside."""
        return self.box.filtered

    def _make_monitor(self) -> MonitorClient:
        spec = jail_spec(self.limits, self.files, self.visible, self.via, self.devices)
        if self.files is not None and self.files.root:
            self._placed = [path.lstrip("/") for path in (*spec["jail"]["files"], *spec["jail"]["visible"])]
        return MonitorClient(spec, self.sandbox_id, self.server)


def jail_spec(
    limits: SandboxLimits, files: Snapshot | None, visible: Sequence[str], via: str, devices: Sequence[str] = ()
) -> JsonObject:
    """Build the specification that the monitor sets the sandbox up from."""
    rootless = not _is_privileged()
    uid = INNER_UID if rootless else random_uid()
    whole = files is not None and files.root
    seen = [] if whole else [*interpreter_folders(), *([str(HERE / "inside")] if via == "bwrap" else [])]
    jail = {
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
        "files": {**_FILES, **account_files(uid, files)},
        "bwrap": None,
        "bwrap_end": [],
    }
    if via == "bwrap":
        jail["bwrap"] = [shutil.which("bwrap") or "bwrap", *_BUBBLEWRAP, "--uid", str(uid), "--gid", str(uid)]
        jail["bwrap_end"] = [
            "--proc",
            "/proc",
            "--remount-ro",
            "/",
            "--chdir",
            "/",
            "--",
            *python_command("main_inside", str(HERE)),
        ]
    return {"jail": jail, "groups": limits.group_limits(), "remove": None, "lower": None}


def _is_privileged() -> bool:
    """True if this is root with CAP_SYS_ADMIN, which may create namespaces; root in a container often lacks it."""
    if os.geteuid() != 0:
        return False
    with open("/proc/self/status") as lines:
        effective = next((int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")), 0)
    return bool(effective >> _CAP_SYS_ADMIN & 1)


def random_uid() -> int:
    """Draw a random user id that no account has; the chance that another sandbox has it is one in a billion."""
    with open("/proc/self/uid_map") as lines:
        most = max(int(inner) + int(count) for inner, _, count in (line.split() for line in lines))
    first = min(_FIRST_UID, most // 2)  # a container may have few user ids
    return first + secrets.randbelow(max(1, min(most, 2 * _FIRST_UID) - first))


def interpreter_folders() -> list[str]:
    """Folder of this Python, without the site packages of a virtual environment; empty if it is in /usr."""
    return [os.path.realpath(sys.base_prefix)] if os.path.realpath(sys.base_prefix) != "/usr" else []


def account_files(uid: int, files: Snapshot | None) -> dict[str, str]:
    """The sandbox's own passwd and group files: those of the root file system, if any, plus the agent's entries."""
    known = {"passwd": "root:x:0:0:root:/root:/bin/sh\n", "group": "root:x:0:\n"}
    if files is not None and files.root:
        for name in ("passwd", "group"):
            path = files.path / "etc" / name
            if path.is_file() and not path.is_symlink():
                known[name] = path.read_text() or known[name]
    return {
        "/etc/passwd": f"{known['passwd'].rstrip()}\nagent:x:{uid}:{uid}:agent:{HOME}:/bin/sh\n",
        "/etc/group": f"{known['group'].rstrip()}\nagent:x:{uid}:\n",
    }


def choose_via(via: str, *, root_file_system: bool = False) -> str:
    """Choose the program that enters the namespaces, `bwrap` or `unshare`; UserError where neither can."""
    if via == "auto":
        via = "unshare" if root_file_system or unavailable_reason("bwrap") is not None else "bwrap"
    why = unavailable_reason(via)
    if why is not None:
        raise UserError(
            f"this machine has no local sandbox: {why}; allow namespaces (docs/sandboxes.md says how), use --sandbox "
            "docker, podman or e2b or, only for code that you trust, --sandbox subprocess, which is not a security "
            "boundary"
        )
    if via == "bwrap" and root_file_system:
        raise UserError("a root file system as a snapshot needs via='unshare': bubblewrap would need a Python in it")
    return via


@functools.cache
def unavailable_reason(via: str) -> str | None:
    """Reason why this machine cannot create sandboxes this way, or None; found by one trial start and cached."""
    if not sys.platform.startswith("linux"):
        return f"namespaces need Linux, and this is {sys.platform}"
    if via == "bwrap":
        if not _is_privileged():
            return "bubblewrap is used only as root; other users enter the namespaces with unshare"
        if (path := shutil.which("bwrap")) is None:
            return "bubblewrap is not installed"
        text = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
        version = re.search(r"(\d+)\.(\d+)", text)
        if version is None or tuple(map(int, version.groups())) < _OLDEST_BUBBLEWRAP:
            return f"bubblewrap {text.split()[-1] if text else '?'} is older than 0.8"
    elif os.uname().machine not in ("x86_64", "aarch64"):
        return f"system call numbers for {os.uname().machine} are not known"
    return _try_start(jail_spec(SandboxLimits(disk_mb=1), None, (), via))


def _try_start(spec: JsonMapping) -> str | None:
    """Start a monitor for the specification and end it; return its error, if any."""
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
        with contextlib.suppress(fd_messages.InvalidMessage, OSError):
            fd_messages.send(life, spec)
        for sock in (life, control):
            try:
                received = fd_messages.receive(sock)
            except (fd_messages.InvalidMessage, OSError):
                received = None
            if received is None:
                error = error or "its first process exited before it was ready"
            elif "error" in received[0]:
                error = str(received[0]["error"])
    _, stderr = process.communicate()
    lines = stderr.decode(errors="replace").strip().splitlines()
    return error and (f"{error} ({lines[-1]})" if lines else error)
