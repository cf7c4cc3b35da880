"""`--sglang-*` and `--router-*` flags: checked against the installed version, and written as its command line.

Invariant: what leaves `check_flags` is a set of options that the installed version has; an option that a flag of the
run decides is refused, so that no two flags ever say different things.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from slime.config import Config
from slime.config.fields import did_you_mean
from slime.engine.http.key import KEY_VARIABLE
from slime.engine.sglang.installed import Installed, Option
from slime.errors import UserError

Flags = dict[str, Any]
"""Options without the dashes in front, and their values; True and False for switches."""

OF_THE_RUN: dict[str, str] = {
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
OF_THE_ROUTER: dict[str, str] = {
    "api-key": "the environment variable SLIME_ENGINE_API_KEY",
    "host": "--host",
    "port": "--sglang-router-port",
    "worker-urls": "--rollout-external-engine-addrs",
    "pd-disaggregation": "--prefill-num-servers",
    "prefill": "--prefill-num-servers",
    "decode": "--prefill-num-servers",
}


def server_flags(config: Config) -> Flags:
    """The `--sglang-*` flags that are meant for SGLang's server."""
    return {
        name.removeprefix("sglang_").replace("_", "-"): value
        for name, value in config.carried.items()
        if name.startswith("sglang_") and not name.startswith("sglang_router_") and name != "sglang_model_routers"
    }


def router_flags(config: Config) -> Flags:
    """The `--router-*` flags, and those of the router that are called `--sglang-router-*`."""
    flags = {
        name.removeprefix("router_").replace("_", "-"): value
        for name, value in config.carried.items()
        if name.startswith("router_")
    }
    timeout = config.carried.get("sglang_router_request_timeout_secs")
    return flags if timeout is None else {"request-timeout-secs": timeout, **flags}


def check_flags(flags: Mapping[str, Any], installed: Installed, *, prefix: str, taken: Mapping[str, str]) -> None:
    """Refuse what the installed version does not have, and what another flag decides."""
    for name, value in flags.items():
        if name in taken:
            raise UserError(f"--{prefix}-{name} is decided by {taken[name]}: drop it")
        option = installed.options.get(name)
        if option is None:
            hint = did_you_mean(name, installed.options, prefix=f"--{prefix}-") or " (its --help lists all)"
            raise UserError(f"--{prefix}-{name}: {installed} has no option --{name}{hint}")
        _check_value(name, value, option, installed, prefix)


def _check_value(name: str, value: Any, option: Option, installed: Installed, prefix: str) -> None:
    if option.is_switch and not isinstance(value, bool):
        raise UserError(f"--{prefix}-{name} is a switch of {installed} and takes no value, not {value!r}")
    if not option.is_switch and value is True and "true" not in (option.choices or ("true",)):
        raise UserError(f"--{prefix}-{name} needs a value: one of {', '.join(option.choices or ())}")
    if option.choices is not None and isinstance(value, str) and value not in option.choices:
        raise UserError(f"--{prefix}-{name} must be one of {', '.join(option.choices)} in {installed}, not {value!r}")


def write_flags(flags: Mapping[str, Any], installed: Installed) -> list[str]:
    """The words of a command line; options that are off or None are left out."""
    words: list[str] = []
    for name, value in flags.items():
        option = installed.options[name]
        if option.is_switch:
            words += [f"--{name}"] if value else []
        elif isinstance(value, list | tuple):
            words += [f"--{name}", *(_word(item) for item in value)]
        elif value is not None:
            words += [f"--{name}={_word(value)}"]  # in one word: a value may begin with a dash
    return words


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


_WITH_KEY = (
    "import os, runpy, stat, sys; "
    "[os.fchmod(log, 0o600) for log in (1, 2) if stat.S_ISREG(os.fstat(log).st_mode)]; "
    f"sys.argv = [*sys.argv[1:], '--api-key=' + os.environ.pop('{KEY_VARIABLE}')]; "
    "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)


def keyed_words(python: str, module: str, words: Sequence[str]) -> tuple[str, ...]:
    """The command line that runs a module with the key in the environment as its `--api-key`. Modules of SGLang take a
    key in no other way, and a process's real command line is read by everybody on its machine. They also write their
    options to their log, which is this user's alone therefore."""
    return (python, "-c", _WITH_KEY, module, *words)
