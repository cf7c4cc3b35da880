"""One engine process as data: what to run, with which environment, where it will answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slime.cluster.devices import threads_per_process, visible_gpus
from slime.cluster.ports import loopback_sockets
from slime.cluster.precision import resolve_rollout_dtype
from slime.cluster.python import module_command
from slime.config import Config
from slime.models.shape import count_parameters
from slime.parsers.formats import REASONING_PARSERS, TOOL_CALL_PARSERS

STREAM_INTERVAL = 32  # tokens between two events of a stream: what a dying engine may lose of each request
EMBEDDED_PARSERS = {"sglang_tool_call_parser": TOOL_CALL_PARSERS, "sglang_reasoning_parser": REASONING_PARSERS}
"""SGLang's flags that the embedded engine has too, and the names that it knows."""
EMBEDDED_ENGINE = module_command("slime.engine.embedded")


@dataclass(frozen=True)
class Launch:
    """The command of one engine; `worker_type` and `bootstrap_port` are what a router must know of it."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    host: str
    port: int
    worker_type: str = "regular"
    bootstrap_port: int | None = None

    @property
    def url(self) -> str:
        """The base URL of the engine for clients on this machine."""
        return f"http://{client_host(self.host)}:{self.port}"


def client_host(host: str) -> str:
    """The address to reach a server that binds to `host`: a wildcard is reached over loopback."""
    return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "[::1]"}.get(host, host)


def engine_env(config: Config, device: str, *, first_gpu: int, gpus: int, processes: int) -> dict[str, str]:
    """The GPUs of an engine, counted from the rollout's first one; on a CPU a share of the cores. Its sockets to other
    processes stay on this machine."""
    if device != "cuda":
        return threads_per_process(processes) | loopback_sockets()
    trainers = 0 if config.colocate else config.actor_num_nodes * config.actor_num_gpus_per_node
    first = trainers + first_gpu
    return {"CUDA_VISIBLE_DEVICES": visible_gpus(range(first, first + gpus))} | loopback_sockets()


def rollout_dtype(config: Config, device: str) -> str:
    """The precision of every engine of a run."""
    return resolve_rollout_dtype(config.rollout_dtype, config.dtype, device, count_parameters(config.hf_checkpoint))


def embedded_launches(
    config: Config,
    ports: Sequence[int],
    *,
    device: str,
    model_path: str,
    name: str,
    launcher: Sequence[str] = EMBEDDED_ENGINE,
) -> list[Launch]:
    """One embedded engine per port, each on a GPU of its own."""
    return [
        Launch(
            f"{name}-{index}",
            (*launcher, *_embedded_argv(config, port, device, model_path)),
            engine_env(config, device, first_gpu=index, gpus=1, processes=len(ports)),
            config.host,
            port,
        )
        for index, port in enumerate(ports)
    ]


def _embedded_argv(config: Config, port: int, device: str, model_path: str) -> list[str]:
    dtype = rollout_dtype(config, device)
    argv = ["--model-path", model_path, "--host", config.host]
    argv += ["--port", str(port), "--device", device, "--dtype", dtype]
    argv += ["--max-running-requests", str(config.engine_max_running_requests)]
    if config.engine_max_total_tokens is not None:
        argv += ["--max-total-tokens", str(config.engine_max_total_tokens)]
    argv += ["--chunked-prefill-size", str(config.engine_chunked_prefill_size)]
    argv += ["--mem-fraction", str(config.engine_mem_fraction)]
    argv += ["--log-level", config.log_level]
    for name in EMBEDDED_PARSERS:
        if (parser := config.carried.get(name)) is not None:
            argv += [f"--{name.removeprefix('sglang_').replace('_', '-')}", str(parser)]
    if config.use_fault_tolerance:
        argv += ["--stream-interval", str(STREAM_INTERVAL), "--incremental-streaming-output"]
    if config.rollout_compile is not None:
        argv.append("--compile" if config.rollout_compile else "--no-compile")
    return [*argv, "--trust-remote-code"] if config.trust_remote_code else argv
