"""Agent of a run on another node: starts processes there, reports their logs and exit codes, and receives files.

Invariant: everything it starts dies with it, and it dies with the driver. It returns plain values; an error is also
returned as a value, never as an exception that the driver would have to unpickle.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from slime.cluster.local import start_child
from slime.cluster.node import ProcessCommand
from slime.cluster.ports import free_ports, sockets_at
from slime.cluster.process import ChildProcess
from slime.cluster.remote.files import FolderTransfer, Inventory, code_inventory, inventory, node_cache
from slime.cluster.rpc.connect import connect_to
from slime.errors import UserError
from slime.storage.json_types import JsonMapping

MAX_LOG_CHUNK = 4 * 2**20
RAY_VARIABLES = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
"""Variables that Ray sets in its workers, which would also apply to the processes started here."""

OK = "ok"
USER_ERROR = "user error"
FAILED = "failed"


class NodeAgent:
    """The agent process; one per node. The driver uses only `call`."""

    def __init__(self, working_folder: str) -> None:
        _remove_ray_variables()
        if os.path.isdir(working_folder):
            os.chdir(working_folder)
        self._logs = Path(tempfile.mkdtemp(prefix="slime-node-"))
        self._processes: dict[int, ChildProcess] = {}
        self._arrivals: dict[str, FolderTransfer] = {}
        self._next = 0
        self._lock = threading.Lock()

    def call(self, method: str, *args: object) -> tuple[str, object]:
        """Call a method; return its status, and its result or the error message."""
        known: dict[str, Callable[..., object]] = {
            "start": self.start,
            "news": self.news,
            **{name: partial(self._act_on, name) for name in ("stop", "terminate", "state", "ask_for_stacks")},
            "free_ports": free_ports,
            "sockets_at": sockets_at,
            "inventory": lambda path: _key(inventory(Path(path))),
            "code_inventory": lambda path: _key(code_inventory(Path(path))),
            "arrive": self.arrive,
            "write": self.write,
            "arrived": self.arrived,
            "sees": self.sees,
            "search_also": self.search_also,
            "close": self.close,
        }
        try:
            return OK, known[method](*args)
        except UserError as error:
            return USER_ERROR, str(error)
        except Exception as error:  # noqa: BLE001 - the boundary of the process: the driver raises it again
            return FAILED, f"{type(error).__name__}: {error}"

    def start(self, fields: JsonMapping, where: str | None, token: str | None) -> tuple[int, int]:
        """Start a process, with a channel to the driver at `where` if given; return its number here and its pid."""
        command = ProcessCommand(**fields)
        with self._lock:
            number = self._next
            self._next += 1
        log = self._logs / f"{number}-{command.name}.log"
        if where is None or token is None:
            process = start_child(command, log)
        else:
            try:
                channel = connect_to(where, token)
            except OSError as error:
                raise UserError(f"the driver cannot be reached at {where.rpartition('/')[0]} ({error})") from error
            with channel:
                process = start_child(command, log, fd=channel.fileno())
        with self._lock:
            self._processes[number] = process
        return number, process.pid

    def news(self, offsets: Mapping[int, int]) -> dict[int, tuple[bytes, int | None]]:
        """Return each log's new bytes from its offset on, and the exit code once the log was read to its end."""
        found: dict[int, tuple[bytes, int | None]] = {}
        for number, offset in offsets.items():
            process = self._processes[number]
            code = process.poll()  # before the log is read, so that the last lines of a process are not missed
            with process.log_path.open("rb") as log:
                log.seek(offset)
                data = log.read(MAX_LOG_CHUNK)
            found[number] = data, None if len(data) == MAX_LOG_CHUNK else code
        return found

    def _act_on(self, method: str, number: int, *args: object) -> object:
        """Call a method of one of the processes."""
        return getattr(self._processes[number], method)(*args)

    def arrive(self, name: str, files: Sequence[tuple[str, int, str]]) -> tuple[str, bool]:
        """Prepare to receive a folder of these files; return its path and True if it is there already."""
        arrival = FolderTransfer(node_cache(), name, Inventory(tuple(files)))
        if not arrival.is_there:
            arrival.begin()
            self._arrivals[str(arrival.final)] = arrival
        return str(arrival.final), arrival.is_there

    def write(self, final: str, file: str, data: bytes) -> None:
        self._arrivals[final].write(file, data)

    def arrived(self, final: str) -> None:
        self._arrivals.pop(final).finish()

    def sees(self, path: str, text: str) -> bool:
        """Return True if the marker file is visible here: the driver's machine shares its folder with this node."""
        folder = os.path.dirname(path)
        try:
            os.listdir(folder)  # makes network file systems refresh
            return Path(path).read_text() == text
        except OSError:
            return False

    def search_also(self, folders: list[str]) -> None:
        """Add folders to the module search path of processes started from now on."""
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([*folders, *([before] if before else [])])

    def close(self) -> None:
        """Stop all running processes and delete their logs."""
        for process in list(self._processes.values()):
            process.stop(1.0)
        shutil.rmtree(self._logs, ignore_errors=True)


def _key(found: Inventory | None) -> str | None:
    return None if found is None else found.key


def _remove_ray_variables() -> None:
    """Remove the variables that Ray set after this process started: they are not the node's own environment."""
    try:
        pairs = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:  # not Linux: what Ray set stays
        return
    names = {os.fsdecode(pair.partition(b"=")[0]) for pair in pairs}
    for name in RAY_VARIABLES:
        if name not in names:
            os.environ.pop(name, None)
