"""Simulated hosts without a shared network stack or shared files: network and mount namespaces of this machine.

Each host has its own address on a switch, which is a namespace too, so the network of this machine stays unchanged.
Each host has its own /dev/shm. All but the first have their own /tmp and no copy of this repository. Needs root and a
kernel that permits namespaces.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.e2e.runs import ROOT, wait_until

STORE_BYTES = 80 * 2**20
PORT = 6379
NODE_CACHE = "/tmp/slime-node-cache"
STARTS, START_LIMIT_S = 3, 120.0


def why_impossible() -> str | None:
    """Returns the reason why hosts cannot be created on this machine, or None."""
    if os.geteuid() != 0:
        return "network and mount namespaces need root"
    if missing := [tool for tool in ("ip", "unshare", "nsenter", "mount") if shutil.which(tool) is None]:
        return f"{', '.join(missing)} is not installed"
    tried = subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True, text=True)
    return None if tried.returncode == 0 else f"this system forbids namespaces: {tried.stderr.strip()}"


@dataclass
class Host:
    namespace: str
    address: str
    ray: subprocess.Popen[bytes]

    def command(self, words: Sequence[str]) -> list[str]:
        """Returns the command that executes `words` on this host."""
        return ["nsenter", f"--target={self.ray.pid}", "--mount", "--net", f"--wd={os.getcwd()}", *words]


@contextmanager
def ray_hosts(cpus: Sequence[int], folder: Path) -> Iterator[list[Host]]:
    """Starts a host with each number of Ray CPUs. The first host is the head and has all files of this machine."""
    mark = uuid.uuid4().hex[:6]
    switch = f"slime-{mark}-switch"
    names = [f"slime-{mark}-{number}" for number in range(len(cpus))]
    hosts: list[Host] = []
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        for number, name in enumerate(names):
            _connect(name, f"10.77.0.{number + 1}", switch, number)
        for number, name in enumerate(names):
            hosts.append(_start_host(name, f"10.77.0.{number + 1}", cpus[number], hosts[:1], folder))
        yield hosts
    finally:
        for name in [*names, switch]:
            for pid in subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        for host in hosts:
            host.ray.wait()
        for name in [*names, switch]:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def _connect(name: str, address: str, switch: str, number: int) -> None:
    _ip("netns", "add", name)
    _ip("-n", switch, "link", "add", f"port{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
    _ip("-n", switch, "link", "set", f"port{number}", "master", "switch", "up")
    _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
    _ip("-n", name, "link", "set", "eth0", "up")
    _ip("-n", name, "link", "set", "lo", "up")


def _start_host(name: str, address: str, cpus: int, head: Sequence[Host], folder: Path) -> Host:
    """Starts a host that joins the cluster. Retries, because a busy machine may miss Ray's 30 s registration limit."""
    log = folder / f"{name}.log"
    for _ in range(STARTS):
        host = _start_ray(name, address, cpus, head, folder)
        assert wait_until(partial(_has_settled, host, log), START_LIMIT_S), log.read_text()
        if host.ray.poll() is None:
            return host
    raise AssertionError(f"{name} did not join the cluster in {STARTS} starts:\n{log.read_text()}")


def _has_settled(host: Host, log: Path) -> bool:
    """Returns whether the host has joined the cluster or exited."""
    return host.ray.poll() is not None or "Ray runtime started." in log.read_text()


def _start_ray(name: str, address: str, cpus: int, head: Sequence[Host], folder: Path) -> Host:
    own = ["/tmp/ray"] if not head else [*_temporary(folder), str(ROOT / "slime"), *_installed_slime()]
    mounts = [f"mkdir -p '{place}' && mount -t tmpfs tmpfs '{place}'" for place in ["/dev/shm", *own]]
    words = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    words += [f"--node-ip-address={address}", f"--num-cpus={cpus}", f"--object-store-memory={STORE_BYTES}"]
    words += (
        [f"--address={head[0].address}:{PORT}"] if head else ["--head", f"--port={PORT}", "--include-dashboard=false"]
    )
    script = " && ".join([f"hostname host-{address.rpartition('.')[2]}", *mounts, 'exec "$@"'])
    environment = {**os.environ, "SLIME_NODE_CACHE": NODE_CACHE, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    with (folder / f"{name}.log").open("wb") as log:
        command = ["ip", "netns", "exec", name, "unshare", "--mount", "--uts", "sh", "-c", script, "sh", *words]
        popen = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd="/", start_new_session=True
        )
    return Host(name, address, popen)


def _temporary(folder: Path) -> list[str]:
    """Returns the folders to mount over: /tmp, or only the written ones if this interpreter is below /tmp."""
    if not Path(sys.prefix).is_relative_to("/tmp"):
        return ["/tmp"]
    return [f"/tmp/{folder.relative_to('/tmp').parts[0]}", "/tmp/ray", NODE_CACHE]


def _installed_slime() -> list[str]:
    """Returns the slime folder found without PYTHONPATH, e.g. an editable install of another checkout."""
    code = "import slime, os; print(os.path.dirname(slime.__file__))"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", code], cwd="/", env=environment, capture_output=True, text=True)
    return done.stdout.split() if done.returncode == 0 else []
