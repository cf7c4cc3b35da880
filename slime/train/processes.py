"""Starts, calls and stops the processes of the trainer ranks.

Invariant: a call goes to all ranks and returns when all have answered. When a rank dies or fails, the error names the
rank and shows the end of its log, and the call does not wait for the other ranks. The deadline of a call counts from
the last progress report of a rank that has not answered yet, so a call may take any time while ranks make progress.
When one rank dies, the others fail in their collectives: the error names the dead rank even if another one fails first.
Ranks run on the slots of the placement, on any node; those on one node share its cores and see only the devices of its
trainers. Ranks meet at a rendezvous that only processes of this run can use: on one machine a file that only this user
can open; over several nodes a store that rank 0 serves at its node's address only, with a random key prefix.
"""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slime.cluster.devices import split_cores, threads_per_process
from slime.cluster.local import LocalCluster
from slime.cluster.node import Node, NodeLost, NodeProcess, ProcessCommand, SlotPlacement
from slime.cluster.ports import sockets_at
from slime.cluster.rpc.channel import Channel, ChannelClosed, ChannelPoller, ChannelTimeout
from slime.cluster.watchdog import Wait, WaitTimeout, expired, raise_failures, waiting
from slime.config import Config
from slime.errors import RunFailed, UserError
from slime.storage.json_types import JsonObject
from slime.train.checkpoints.errors import NotWritten


@dataclass(frozen=True)
class TrainerRendezvous:
    """Rendezvous of the ranks: a `file`, or the `port` at `host` where rank 0 serves a store with the key `prefix`.

    `address` selects the network interface that a rank uses (None: as its environment sets it).
    """

    file: str = ""
    host: str = ""
    port: int = 0
    prefix: str = ""
    address: str | None = None


POLL_S = 0.2
STOP_GRACE_S = 5.0
DEATH_PATIENCE_S = 2.0
"""Time after a rank's failure in which the death of another rank, which would explain it, may be detected."""
DEADLINE_FLAG = "--distributed-timeout-minutes"
_STARTED_AT_ONCE = 512


class TrainerDied(RunFailed):
    """Raised when a rank dies or fails in a way the user did not cause."""


class TrainerTimeout(WaitTimeout):
    """Raised when ranks neither answer nor report progress within the deadline."""


@dataclass
class Rank:
    process: NodeProcess
    channel: Channel


class RankProcesses:
    """Starts, calls and stops the trainer processes. `device` is `cpu` or `cuda`."""

    def __init__(self, config: Config, *, device: str, run_dir: Path, placement: SlotPlacement | None = None) -> None:
        """Use the slots of `placement`; without one, run on this machine."""
        self.placement = placement or LocalCluster(config, device=device, rollout=0).placement
        self.slots = self.placement.trainers
        self.world_size = len(self.slots)
        self.are_here = all(slot.node.is_here for slot in self.slots)
        self._on_node: dict[int, list[int]] = {}
        for rank, slot in enumerate(self.slots):
            self._on_node.setdefault(id(slot.node), []).append(rank)
        self.ranks: list[Rank] = []
        self.deadline_s = config.distributed_timeout_minutes * 60.0
        self.doing: str | None = None
        """The latest progress report of a rank in the call in flight."""
        self._config = config
        self._device = device
        self._run_dir = run_dir
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._next_id = 0
        self._failed = False

    @property
    def are_usable(self) -> bool:
        """True if all ranks run and are in step."""
        return bool(self.ranks) and not self._failed

    @property
    def names(self) -> str:
        return _rank_names(range(len(self.ranks)))

    def launch(self) -> list[TrainerRendezvous]:
        """Start all ranks and return the rendezvous of each."""
        if self.are_here:
            self._folder = tempfile.TemporaryDirectory(prefix="slime-trainers-")
            meeting = TrainerRendezvous(file=str(Path(self._folder.name) / "store"))
        else:
            node = self.slots[0].node
            with _name_failures(node, 0):
                port = node.free_ports(1)[0]
            meeting = TrainerRendezvous(host=node.address, port=port, prefix=secrets.token_hex(16))
        is_local = self.placement.is_here

        def launch(rank: int) -> Rank:
            name, node = f"trainer-{rank}", self.slots[rank].node
            passed = tuple(self._config.pass_env or ())
            command = ProcessCommand(
                name, (), module="slime.train.worker", env=self.environment(rank), pass_env=passed, dumps_stacks=True
            )
            with _name_failures(node, rank):
                return Rank(*node.start_connected(command, self._run_dir / "logs" / f"{name}.log"))

        with ThreadPoolExecutor(min(self.world_size, _STARTED_AT_ONCE), "launch-trainer") as pool:
            starting = [pool.submit(launch, rank) for rank in range(self.world_size)]
            try:
                wait_for(starting, return_when=FIRST_EXCEPTION)
            finally:  # `stop` stops the started ranks, also after an interrupt
                pool.shutdown(cancel_futures=True)
                self.ranks = [one.result() for one in starting if not one.cancelled() and one.exception() is None]
        for one in starting:
            if not one.cancelled():
                one.result()
        return [replace(meeting, address=None if is_local else slot.node.address) for slot in self.slots]

    def all_alive(self) -> bool:
        return all(rank.process.poll() is None for rank in self.ranks)

    def stop(self) -> None:
        """Stop all ranks; safe to call twice and after a failure."""
        ranks, self.ranks = self.ranks, []
        if not self._failed:  # ranks that failed or hang would not read the request
            for rank in ranks:
                if rank.process.poll() is None:
                    try:
                        rank.channel.send({"id": -1, "method": "stop", "params": {}}, timeout_s=1.0)
                    except (ChannelClosed, ChannelTimeout, OSError):
                        continue
            with waiting(_rank_names(range(len(ranks))), "to end", timeout_s=STOP_GRACE_S) as wait:
                for rank in ranks:
                    rank.process.wait(wait.remaining())
        for rank in ranks:
            rank.process.terminate()
        deadline = time.monotonic() + STOP_GRACE_S
        for rank in ranks:
            rank.process.stop(grace_s=max(0.0, deadline - time.monotonic()))
            rank.channel.close()
        if self._folder is not None:
            self._folder.cleanup()

    def environment(self, rank: int) -> dict[str, str]:
        """Return the variables of a rank that override its node's: its ranks, devices and numbers of threads."""
        node, peers = self.slots[rank].node, self._on_node[id(self.slots[rank].node)]
        env = {"PYTHONUNBUFFERED": "1"}
        if self.placement.is_here and not self._config.rollout_external_engine_addrs:  # those connect to rank 0
            env |= sockets_at("127.0.0.1")
        if self._device == "cpu":
            env |= threads_per_process(len(peers)) if node.is_here else split_cores(node.cores, len(peers))
        devices = [device for other in peers if (device := self.slots[other].device) is not None]
        if devices:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        env |= {name: str(value) for name, value in self._config.train_env_vars.items()}
        return env | {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(peers.index(rank)),
            "LOCAL_WORLD_SIZE": str(len(peers)),
        }

    def call(self, method: str, each: Sequence[JsonObject] | None = None, /, **params: object) -> list[Any]:
        """Call a method of every rank, with its own parameters or the same ones; return the answers in rank order."""
        if not self.ranks:
            raise RuntimeError(f"{method} was called on a trainer group that is not running")
        self._next_id += 1
        self.doing = None
        for rank in self.ranks:
            rank.process.said(None)
        try:
            with waiting(self.names, f"to finish {method}", timeout_s=self.deadline_s, flag=DEADLINE_FLAG) as wait:
                for index, (rank, own) in enumerate(zip(self.ranks, each or [params] * len(self.ranks), strict=True)):
                    request = {"id": self._next_id, "method": method, "params": own}
                    try:
                        rank.channel.send(request, timeout_s=wait.remaining() or 0.0)
                    except ChannelClosed as cause:
                        raise self._death_error(index, method) from cause
                    except ChannelTimeout as cause:
                        raise self._timeout([index], f"to take the request {method}", wait) from cause
                return self._collect(method, wait)
        except (UserError, NotWritten):
            raise
        except BaseException:
            self._failed = True
            raise
        finally:
            self.doing = None

    def _collect(self, method: str, wait: Wait) -> list[object]:
        """Receive the answers of all ranks, in rank order; progress reports renew the deadline."""
        results: dict[int, object] = {}
        listening = ChannelPoller([rank.channel for rank in self.ranks])
        while len(results) < len(self.ranks):
            ready = listening.ready(POLL_S)
            for index in ready:
                try:
                    reply = self.ranks[index].channel.recv(max(wait.remaining() or 0.0, 1.0))
                except ChannelClosed as cause:
                    raise self._death_error(index, method) from cause
                except ChannelTimeout as cause:
                    raise self._timeout([index], f"to end its answer to {method}", wait) from cause
                if "progress" in reply:
                    if reply["id"] == self._next_id:
                        wait.renew()
                        self.doing = reply["progress"]
                        self.ranks[index].process.said(self.doing)
                    continue
                if reply["id"] != self._next_id:
                    raise RuntimeError(f"trainer-{index} answered request {reply['id']}, not {self._next_id}")
                results[index] = reply["result"] if reply["ok"] else self._failure(index, method, reply["error"])
                listening.without(index)
            if not ready:
                missing = [index for index in range(len(self.ranks)) if index not in results]
                wait.whom = _rank_names(missing)
                for index in missing:  # a lost node closes no connection: its loss is detected separately
                    if self.slots[index].node.is_lost:
                        raise self._death_error(index, method)
                if wait.is_over():
                    raise self._timeout(missing, f"to finish {method}", wait)
            raise_failures()
        for result in results.values():
            if isinstance(result, NotWritten):
                raise result
        return [results[index] for index in range(len(self.ranks))]

    def _timeout(self, missing: Sequence[int], why: str, wait: Wait) -> WaitTimeout:
        """Make the error of a timeout, with the states of the missing ranks: one hangs and the others wait for it."""
        wait.whom, wait.why = _rank_names(missing), why
        states = "; ".join(self.ranks[index].process.state() for index in missing)
        return expired(wait, TrainerTimeout, f"{wait.sentence()}: {states}")

    def _failure(self, index: int, method: str, error: JsonObject) -> NotWritten:
        """Raise the error of a rank; a `NotWritten` is returned, to be raised when all ranks have answered."""
        if error["user_error"]:
            raise UserError(error["message"])
        if error["not_written"]:
            return NotWritten(error["message"])
        others = [other for other in range(len(self.ranks)) if other != index]
        if others:  # another rank may have died, which explains this rank's failure
            with waiting(_rank_names(others), "to be confirmed alive", timeout_s=DEATH_PATIENCE_S) as wait:
                while not wait.is_over():
                    for other in others:
                        if self.ranks[other].process.poll() is not None:
                            raise self._death_error(other, method)
                    time.sleep(POLL_S / 4)
        states = "; ".join(self.ranks[other].process.state() for other in others)
        raise TrainerDied(
            f"trainer-{index} failed in {method}: {error['type']}: {error['message']}\n{error['traceback']}"
            + (f"\n{states}" if states else "")
        )

    def _death_error(self, index: int, method: str) -> TrainerDied:
        """Make the error of a dead rank, with its exit code and the end of its log."""
        process, node = self.ranks[index].process, self.slots[index].node
        code = process.wait(2.0)
        how = f"its node {node.name} is gone" if node.is_lost else f"exit code {code}"
        return TrainerDied(
            f"trainer-{index} ended during {method} ({how}); last lines of {process.log_path}:\n{process.tail()}"
        )


@contextmanager
def _name_failures(node: Node, rank: int) -> Iterator[None]:
    """Name the rank and its node in errors of a failed start."""
    try:
        yield
    except NodeLost as error:
        raise TrainerDied(f"trainer-{rank} cannot be started: its node {node.name} is gone ({error})") from error
    except (ChannelClosed, ChannelTimeout) as error:
        raise TrainerDied(f"trainer-{rank} was started on {node.name} and did not connect: {error}") from error


def _rank_names(indices: Iterable[int]) -> str:
    return ", ".join(f"trainer-{index}" for index in indices)
