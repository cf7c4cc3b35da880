"""The command lines of SGLang servers: `python -m sglang.launch_server` with what the run decides.

Later sources beat earlier ones: defaults for the device, what the run's flags say, the user's `--sglang-*`, and a
group's overrides. Nothing is guessed about the version: every option that is written is one the installed version has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from slime.config import Config
from slime.config.suggest import did_you_mean
from slime.engine.launch import STREAM_INTERVAL, Launch, engine_env, rollout_dtype
from slime.engine.sglang.flags import OF_THE_RUN, Flags, check_flags, server_flags, write_flags
from slime.engine.sglang.installed import Installed
from slime.engine.sglang.topology import ServedModel, ServerGroup
from slime.errors import UserError

ON_A_CPU: Flags = {
    "attention-backend": "torch_native",
    "mem-fraction-static": 0.1,
    "max-total-tokens": 16384,
    "max-running-requests": 64,
    "sleep-on-idle": True,
    "disable-overlap-schedule": True,
}
"""Without these a server finds no attention kernel, takes most of the memory, or keeps a core busy when idle."""
ROUTED_EXPERTS = "enable-return-routed-experts"
PORTS_PER_ENGINE = 3
"""HTTP, the rendezvous of its ranks, and the bootstrap of a prefill server."""


def check_server_flags(config: Config, models: Sequence[ServedModel], installed: Installed) -> None:
    """Refuse `--sglang-*` flags and overrides that the installed version does not have."""
    check_flags(server_flags(config), installed, prefix="sglang", taken=OF_THE_RUN)
    pp_size = _pipeline_stages(config)
    if config.use_rollout_routing_replay:
        _check_routing(models, installed)
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


def _check_routing(models: Sequence[ServedModel], installed: Installed) -> None:
    if ROUTED_EXPERTS not in installed.options:
        raise UserError(
            f"--use-rollout-routing-replay needs servers with --{ROUTED_EXPERTS}, which {installed} has not: use a "
            "newer version"
        )
    if any(model.is_disaggregated and model.update_weights for model in models):
        raise UserError(
            "--use-rollout-routing-replay does not go with prefill and decode servers: no one of them knows which "
            "experts all tokens of an answer went to"
        )


def sglang_launches(
    config: Config, ports: Sequence[int], *, device: str, model: ServedModel, name: str, installed: Installed
) -> list[Launch]:
    """The servers of a model in the order of its groups; `ports` are `PORTS_PER_ENGINE` for each of them."""
    launches: list[Launch] = []
    for index, (group, first_gpu) in enumerate(_slots(model)):
        http, rendezvous, bootstrap = ports[index * PORTS_PER_ENGINE : (index + 1) * PORTS_PER_ENGINE]
        own = _own_flags(config, device, group, installed) | _role_flags(group, bootstrap)
        own |= {"model-path": model.model_path, "port": http, "nccl-port": rendezvous}
        if config.use_rollout_routing_replay and model.update_weights:
            own[ROUTED_EXPERTS] = True
        own["random-seed"] = config.seed + first_gpu
        defaults = ON_A_CPU if device == "cpu" else {}
        flags = defaults | own | server_flags(config) | dict(group.overrides)
        argv = (installed.python, "-m", "sglang.launch_server", *write_flags(flags, installed))
        env = engine_env(
            config, device, first_gpu=first_gpu, gpus=group.num_gpus_per_engine, processes=model.num_engines
        )
        if device == "cpu":
            env["SGLANG_USE_CPU_ENGINE"] = "1"
        is_prefill = group.worker_type == "prefill"
        launches.append(
            Launch(
                f"{name}-{index}",
                argv,
                env,
                config.host,
                http,
                worker_type=group.worker_type,
                bootstrap_port=bootstrap if is_prefill else None,
            )
        )
    return launches


def _slots(model: ServedModel) -> Iterator[tuple[ServerGroup, int]]:
    """Each engine's group and its first GPU among those of the rollout."""
    for group in model.groups:
        for number in range(group.num_engines):
            yield group, group.first_gpu + number * group.num_gpus_per_engine


_STREAMED = {"stream-interval": STREAM_INTERVAL, "incremental-streaming-output": True}


def _own_flags(config: Config, device: str, group: ServerGroup, installed: Installed) -> Flags:
    flags: dict[str, Any] = {
        "host": config.host,
        "device": device,
        "dtype": rollout_dtype(config, device),
        "tp-size": group.num_gpus_per_engine // _pipeline_stages(config),
        "base-gpu-id": 0,  # CUDA_VISIBLE_DEVICES names the engine's own GPUs
        "log-level": config.log_level,
        "trust-remote-code": config.trust_remote_code,
        "enable-memory-saver": config.offload_rollout,
        **(_STREAMED if config.use_fault_tolerance else {}),
    }
    return {name: value for name, value in flags.items() if name in installed.options}


def _role_flags(group: ServerGroup, bootstrap_port: int) -> Flags:
    if group.worker_type == "prefill":
        return {
            "disaggregation-mode": "prefill",
            "disaggregation-bootstrap-port": bootstrap_port,
            "load-balance-method": "follow_bootstrap_room",
        }
    if group.worker_type == "decode":
        return {"disaggregation-mode": "decode"}
    return {}


def _pipeline_stages(config: Config) -> int:
    flags = server_flags(config)
    stages = flags.get("pp-size", flags.get("pipeline-parallel-size", 1))
    if isinstance(stages, bool) or not isinstance(stages, int) or stages < 1:
        raise UserError(f"--sglang-pp-size must be a whole number of at least 1, not {stages!r}")
    return stages
