"""Launch description of an engine: its commands, nodes, environment and address."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from slime.cluster.devices import resolve_rollout_dtype, split_cores, threads_per_process
from slime.cluster.node import Node, ProcessCommand, Slot
from slime.config import Config
from slime.engine.http.blocking import key_variable
from slime.models.parsers.formats import REASONING_PARSERS, TOOL_CALL_PARSERS
from slime.models.shape import count_parameters

STREAM_INTERVAL = 32  # tokens between two events of a stream: the most that a dying engine loses of each request
EMBEDDED_PARSERS = {"sglang_tool_call_parser": TOOL_CALL_PARSERS, "sglang_reasoning_parser": REASONING_PARSERS}
"""SGLang's parser flags that the embedded engine supports, and the parsers it has."""
EMBEDDED_MODULE = "slime.engine.embedded"
EngineSlots = tuple[Slot, ...]
"""The slots of one engine."""


class ProcessStart(NamedTuple):
    """A process of an engine: its command and its node."""

    node: Node
    command: ProcessCommand


@dataclass(frozen=True)
class Launch:
    """One engine: its processes, one for each node it spans, of which the first answers HTTP at `host` and `port`.

    `worker_type` and `bootstrap_port` are for a router. An external engine has no processes.
    """

    name: str
    host: str
    port: int
    starts: tuple[ProcessStart, ...] = ()
    worker_type: str = "regular"
    bootstrap_port: int | None = None

    @property
    def url(self) -> str:
        """Base URL of the engine for the run's clients."""
        return engine_url(self.host, self.port)


def engine_url(host: str, port: int) -> str:
    """URL of a server that binds to `host`; a wildcard is reached over loopback."""
    address = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def engine_env(device: str, slots: EngineSlots, *, seats: Sequence[EngineSlots]) -> dict[str, str]:
    """Environment of an engine's process on one node: its GPUs there, or its share of the node's cores, which are
    divided among all engines on the node (`seats` has all engines)."""
    node = slots[0].node
    if device == "cuda":
        return {"CUDA_VISIBLE_DEVICES": ",".join(str(slot.device) for slot in slots), **node.sockets}
    processes = sum(any(slot.node is node for slot in seat) for seat in seats)
    threads = threads_per_process(processes) if node.is_here else split_cores(node.cores, processes)
    return {**threads, **node.sockets}


class PortAllocator:
    """Allocates ports on several nodes; each port of a node is allocated only once."""

    def __init__(self) -> None:
        self._given: dict[int, set[int]] = {}

    def take(self, node: Node, count: int) -> list[int]:
        """Return `count` ports of a node that are free now and were not allocated before."""
        given = self._given.setdefault(id(node), set())
        found: list[int] = []
        while len(found) < count:
            found += [port for port in node.free_ports(count - len(found)) if port not in given]
            given.update(found)
        return found


def rollout_dtype(config: Config, device: str) -> str:
    """Precision of all engines of a run."""
    return resolve_rollout_dtype(config.rollout_dtype, config.dtype, device, count_parameters(config.hf_checkpoint))


def embedded_launch(
    config: Config,
    name: str,
    seat: EngineSlots,
    port: int,
    *,
    seats: Sequence[EngineSlots],
    device: str,
    model_path: str,
    launcher: Sequence[str] = (),
    key: str,
) -> Launch:
    """Launch of an embedded engine on the first slot of its seat; `launcher` replaces the engine's program. The key is
    in the environment, because other users of the machine can read command lines."""
    node = seat[0].node
    dtype = rollout_dtype(config, device)
    argv = ["--model-path", node.path(model_path), "--host", node.address]
    argv += ["--port", str(port), "--device", device, "--dtype", dtype]
    argv += ["--max-running-requests", str(config.engine_max_running_requests)]
    if config.engine_max_total_tokens is not None:
        argv += ["--max-total-tokens", str(config.engine_max_total_tokens)]
    argv += ["--chunked-prefill-size", str(config.engine_chunked_prefill_size)]
    argv += ["--mem-fraction", str(config.engine_mem_fraction)]
    argv += ["--log-level", config.log_level]
    for flag in EMBEDDED_PARSERS:
        if (parser := config.carried.get(flag)) is not None:
            argv += [f"--{flag.removeprefix('sglang_').replace('_', '-')}", str(parser)]
    if config.use_fault_tolerance:
        argv += ["--stream-interval", str(STREAM_INTERVAL), "--incremental-streaming-output"]
    if config.rollout_compile is not None:
        argv.append("--compile" if config.rollout_compile else "--no-compile")
    if config.trust_remote_code:
        argv.append("--trust-remote-code")
    command = ProcessCommand(
        name,
        (*launcher, *argv),
        module=None if launcher else EMBEDDED_MODULE,
        env=engine_env(device, seat[:1], seats=seats) | {key_variable(node.address): key},
        pass_env=tuple(config.pass_env or ()),
        dumps_stacks=not launcher,
        also=(engine_url(node.address, port),),
    )
    return Launch(name, node.address, port, (ProcessStart(node, command),))
