"""Command lines of SGLang servers: `python -m sglang.launch_server` with the options of the run.

Later sources override earlier ones: defaults for the device, the run's flags, the user's `--sglang-*` flags, and a
group's overrides. Nothing is assumed about the version.

`check_flags` checks `--sglang-*` and `--router-*` flags. Invariant: the installed version has every option that is
written, and an option that a flag of the run decides is refused, so that no two flags contradict each other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from slime.cluster.node import OWN_PYTHON, ProcessCommand
from slime.config import Config
from slime.config.fields import did_you_mean
from slime.engine.http.blocking import KEY_VARIABLE
from slime.engine.launch import (
    STREAM_INTERVAL,
    EngineSlots,
    Launch,
    PortAllocator,
    ProcessStart,
    engine_env,
    engine_url,
    rollout_dtype,
)
from slime.engine.sglang.installed import InstalledPackage
from slime.engine.sglang.topology import ServedModel, ServerGroup
from slime.errors import UserError
from slime.storage.json_types import JsonMapping, JsonObject

Flags = JsonObject
"""Option names without leading dashes, and their values; True and False for switches."""

SERVER_OPTIONS_OF_RUN: dict[str, str] = {
    "model-path": "--hf-checkpoint",
    "model": "--hf-checkpoint",
    "host": "--host",
    "port": "--engine-port",
    "device": "--device",
    "dtype": "--rollout-dtype",
    "tp": "--rollout-num-gpus-per-engine",
    "tp-size": "--rollout-num-gpus-per-engine",
    "tensor-parallel-size": "--rollout-num-gpus-per-engine",
    "nnodes": "--rollout-num-gpus-per-engine",
    "node-rank": "--rollout-num-gpus-per-engine",
    "dist-init-addr": "--rollout-num-gpus-per-engine",
    "api-key": "the environment variable SLIME_ENGINE_API_KEY",
    "admin-api-key": "the environment variable SLIME_ENGINE_API_KEY",
    "random-seed": "--seed",
    "log-level": "--log-level",
    "trust-remote-code": "--trust-remote-code",
    "enable-memory-saver": "--offload-rollout",
    "enable-return-routed-experts": "--use-rollout-routing-replay",
    "disaggregation-mode": "--prefill-num-servers",
    "disaggregation-bootstrap-port": "--prefill-num-servers",
}
ROUTER_OPTIONS_OF_RUN: dict[str, str] = {
    "api-key": "the environment variable SLIME_ENGINE_API_KEY",
    "host": "--host",
    "port": "--sglang-router-port",
    "worker-urls": "--rollout-external-engine-addrs",
    "pd-disaggregation": "--prefill-num-servers",
    "prefill": "--prefill-num-servers",
    "decode": "--prefill-num-servers",
}


def server_flags(config: Config) -> Flags:
    """The `--sglang-*` flags for SGLang's server."""
    return {
        name.removeprefix("sglang_").replace("_", "-"): value
        for name, value in config.carried.items()
        if name.startswith("sglang_") and not name.startswith("sglang_router_") and name != "sglang_model_routers"
    }


def router_flags(config: Config) -> Flags:
    """The `--router-*` flags, and the router's request timeout from `--sglang-router-request-timeout-secs`."""
    flags = {
        name.removeprefix("router_").replace("_", "-"): value
        for name, value in config.carried.items()
        if name.startswith("router_")
    }
    timeout = config.carried.get("sglang_router_request_timeout_secs")
    return flags if timeout is None else {"request-timeout-secs": timeout, **flags}


def check_flags(flags: JsonMapping, installed: InstalledPackage, *, prefix: str, taken: Mapping[str, str]) -> None:
    """Refuse options that the installed version does not have, and options that another flag decides (`taken`)."""
    for name, value in flags.items():
        if name in taken:
            raise UserError(f"--{prefix}-{name} is decided by {taken[name]}: drop it")
        option = installed.options.get(name)
        if option is None:
            hint = did_you_mean(name, installed.options, prefix=f"--{prefix}-") or " (its --help lists all)"
            raise UserError(f"--{prefix}-{name}: {installed} has no option --{name}{hint}")
        choices = option.choices
        if option.is_switch and not isinstance(value, bool):
            raise UserError(f"--{prefix}-{name} is a switch of {installed} and takes no value, not {value!r}")
        if not option.is_switch and value is True and "true" not in (choices or ("true",)):
            raise UserError(f"--{prefix}-{name} needs a value: one of {', '.join(choices or ())}")
        if choices is not None and isinstance(value, str) and value not in choices:
            raise UserError(f"--{prefix}-{name} must be one of {', '.join(choices)} in {installed}, not {value!r}")


def flags_to_args(flags: JsonMapping, installed: InstalledPackage) -> list[str]:
    """Convert options to command-line arguments; options that are off or None are left out."""
    words: list[str] = []
    for name, value in flags.items():
        option = installed.options[name]
        if option.is_switch:
            words += [f"--{name}"] if value else []
        elif isinstance(value, list | tuple):
            words += [f"--{name}", *(_format_value(item) for item in value)]
        elif value is not None:
            words += [f"--{name}={_format_value(value)}"]  # one argument, since a value may begin with a dash
    return words


def _format_value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


_KEY_WRAPPER = (
    "import os, runpy, stat, sys; "
    "[os.fchmod(log, 0o600) for log in (1, 2) if stat.S_ISREG(os.fstat(log).st_mode)]; "
    f"sys.argv = [*sys.argv[1:], '--api-key=' + os.environ.pop('{KEY_VARIABLE}')]; "
    "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)


def command_with_key(python: str, module: str, words: Sequence[str]) -> tuple[str, ...]:
    """Command line that runs a module with the environment's key as its `--api-key`. SGLang's modules accept a key only
    as an option, but every user of a machine can read a process's real command line. The modules also write their
    options to their log, so the log is made readable for this user only."""
    return (python, "-c", _KEY_WRAPPER, module, *words)


CPU_DEFAULTS: Flags = {
    "attention-backend": "torch_native",
    "mem-fraction-static": 0.1,
    "max-total-tokens": 16384,
    "max-running-requests": 64,
    "sleep-on-idle": True,
    "disable-overlap-schedule": True,
}
"""Defaults for CPUs: without them a server has no attention kernel, uses most of the memory, or keeps a core busy while
idle."""
ROUTED_EXPERTS = "enable-return-routed-experts"
PORTS_PER_ENGINE = 3
"""HTTP, the rendezvous of its ranks, and the bootstrap of a prefill server."""


def check_server_flags(config: Config, models: Sequence[ServedModel], installed: InstalledPackage) -> None:
    """Refuse `--sglang-*` flags and overrides that the installed version does not have."""
    check_flags(server_flags(config), installed, prefix="sglang", taken=SERVER_OPTIONS_OF_RUN)
    pp_size = _pipeline_stages(config)
    if config.use_rollout_routing_replay:
        if ROUTED_EXPERTS not in installed.options:
            raise UserError(
                f"--use-rollout-routing-replay needs servers with --{ROUTED_EXPERTS}, which {installed} has not: use a "
                "newer version"
            )
        if any(model.is_disaggregated and model.update_weights for model in models):
            raise UserError(
                "--use-rollout-routing-replay does not support prefill and decode servers: none of them has the "
                "experts of all tokens of a response"
            )
    for model in models:
        for group in model.groups:
            for name in group.overrides:
                if name not in installed.options:
                    hint = did_you_mean(name, installed.options)
                    raise UserError(
                        f"--sglang-config: model {model.name} overrides {name}, which {installed} has not{hint}"
                    )
            if group.num_engines and group.num_gpus_per_engine % pp_size:
                raise UserError(
                    f"--sglang-pp-size {pp_size} does not divide the {group.num_gpus_per_engine} GPUs of an engine"
                )


def sglang_launch(
    config: Config,
    name: str,
    seat: EngineSlots,
    ports: PortAllocator,
    place: tuple[ServerGroup, int],
    *,
    seats: Sequence[EngineSlots],
    device: str,
    model: ServedModel,
    installed: InstalledPackage,
    http_port: int | None = None,
    key: str,
) -> Launch:
    """Launch of an SGLang engine of a model: one server, or one on each node of its seat. `place` is its group and its
    first GPU among those of the rollout. All of its routes require the key: if only control routes did, `/server_info`
    would disclose the key to anyone."""
    (group, first_gpu), node = place, seat[0].node
    http, rendezvous, bootstrap = ports.take(node, PORTS_PER_ENGINE)
    http = http if http_port is None else http_port
    own = _own_flags(config, device, group, installed, bootstrap)
    if config.use_rollout_routing_replay and model.update_weights:
        own |= {ROUTED_EXPERTS: True}
    own |= {"random-seed": config.seed + first_gpu}
    starts = []
    for rank, (slots, where) in enumerate(_node_flags(seat, ports, http, rendezvous)):
        own |= where | {"model-path": slots[0].node.path(model.model_path)}
        defaults = CPU_DEFAULTS if device == "cpu" else {}
        flags = defaults | own | server_flags(config) | dict(group.overrides)
        python = OWN_PYTHON if config.sglang_python is None else installed.python
        command = ProcessCommand(
            name if rank == 0 else f"{name}-node-{rank}",
            command_with_key(python, "sglang.launch_server", flags_to_args(flags, installed)),
            pass_env=tuple(config.pass_env or ()),
        )
        env = engine_env(device, slots, seats=seats) | {KEY_VARIABLE: key}
        env |= {"SGLANG_USE_CPU_ENGINE": "1"} if device == "cpu" else {}
        also = (engine_url(node.address, http),) if rank == 0 else ()
        starts.append(ProcessStart(slots[0].node, replace(command, env=env, also=also)))
    return Launch(
        name,
        node.address,
        http,
        tuple(starts),
        worker_type=group.worker_type,
        bootstrap_port=bootstrap if group.worker_type == "prefill" else None,
    )


def places(model: ServedModel) -> Iterator[tuple[ServerGroup, int]]:
    """Yield each engine's group and its first GPU among those of the rollout."""
    for group in model.groups:
        for number in range(group.num_engines):
            yield group, group.first_gpu + number * group.num_gpus_per_engine


def _node_flags(
    seat: EngineSlots, ports: PortAllocator, http: int, rendezvous: int
) -> Iterator[tuple[EngineSlots, Flags]]:
    """Yield the slots of an engine on each of its nodes, and the server's options for the other nodes.

    The first server answers requests; the servers that SGLang runs on the other nodes only report that they are alive.
    """
    parts = [tuple(slots) for _, slots in groupby(seat, key=lambda slot: id(slot.node))]
    first = seat[0].node
    if len({len(slots) for slots in parts}) > 1:
        here = ", ".join(f"{len(slots)} on {slots[0].node.name}" for slots in parts)
        raise UserError(
            f"--rollout-num-gpus-per-engine {len(seat)}: SGLang needs the same number of GPUs on each node "
            f"of an engine, but there are {here}"
        )
    for rank, slots in enumerate(parts):
        node = slots[0].node
        port = http if rank == 0 else ports.take(node, 1)[0]
        where: Flags = {"host": node.address, "port": port}
        if len(parts) == 1:
            yield slots, {**where, "nccl-port": rendezvous}
        else:
            address = engine_url(first.address, rendezvous).removeprefix("http://")
            yield slots, {**where, "nnodes": len(parts), "node-rank": rank, "dist-init-addr": address}


_STREAMING_OPTIONS = {"stream-interval": STREAM_INTERVAL, "incremental-streaming-output": True}


def _own_flags(
    config: Config, device: str, group: ServerGroup, installed: InstalledPackage, bootstrap_port: int
) -> Flags:
    """Options that the run's flags and the group's role decide."""
    flags: Flags = {
        "device": device,
        "dtype": rollout_dtype(config, device),
        "tp-size": group.num_gpus_per_engine // _pipeline_stages(config),
        "base-gpu-id": 0,  # CUDA_VISIBLE_DEVICES names the engine's own GPUs
        "log-level": config.log_level,
        "trust-remote-code": config.trust_remote_code,
        "enable-memory-saver": config.offload_rollout,
        **(_STREAMING_OPTIONS if config.use_fault_tolerance else {}),
    }
    flags = {name: value for name, value in flags.items() if name in installed.options}
    if group.worker_type == "prefill":
        flags |= {
            "disaggregation-mode": "prefill",
            "disaggregation-bootstrap-port": bootstrap_port,
            "load-balance-method": "follow_bootstrap_room",
        }
    elif group.worker_type == "decode":
        flags |= {"disaggregation-mode": "decode"}
    return flags


def _pipeline_stages(config: Config) -> int:
    flags = server_flags(config)
    stages = flags.get("pp-size", flags.get("pipeline-parallel-size", 1))
    if isinstance(stages, bool) or not isinstance(stages, int) or stages < 1:
        raise UserError(f"--sglang-pp-size must be a whole number of at least 1, not {stages!r}")
    return stages
