"""Choice of the engine (SGLang's server, the embedded engine or external engines) and of the router, with reasons."""

from __future__ import annotations

from slime.config import Config
from slime.engine.sglang.installed import SGLANG, InstalledPackage, find_installed, installed_version
from slime.engine.sglang.router import external_router, find_router, router_not_installed
from slime.errors import UserError

EMBEDDED, SGLANG_SERVER, EXTERNAL = "embedded", "sglang", "external"
BUILTIN, SGLANG_ROUTER = "builtin", "sglang"


def choose_backend(config: Config, device: str) -> tuple[str, str]:
    """The engine to start for `--rollout-backend`, and the reason."""
    requested = config.rollout_backend
    if config.rollout_external_engine_addrs:
        return EXTERNAL, "--rollout-external-engine-addrs names engines that are only attached"
    if requested == EMBEDDED:
        return EMBEDDED, "asked for"
    if requested == "auto" and device != "cuda":
        return EMBEDDED, "there is no GPU for SGLang"
    version = installed_version(SGLANG, config.sglang_python)
    if version is not None:
        return SGLANG_SERVER, f"SGLang {version} {'was asked for' if requested == SGLANG_SERVER else 'is installed'}"
    if requested == "auto":
        return EMBEDDED, "SGLang is not installed"
    raise UserError(_not_installed(config))


def choose_router(config: Config, backend: str) -> tuple[str, str]:
    """The router that distributes requests over the engines of a model, and the reason."""
    requested = config.rollout_router
    if requested == BUILTIN:
        return BUILTIN, "asked for"
    if backend == EMBEDDED and requested == SGLANG_ROUTER:
        raise UserError("--rollout-router sglang is for SGLang engines: add --rollout-backend sglang")
    if backend != SGLANG_SERVER and requested != SGLANG_ROUTER:
        return BUILTIN, f"it takes {backend} engines"
    if external_router(config) is not None:
        return SGLANG_ROUTER, "--sglang-router-ip names one"
    installed = find_router(config)
    if installed is not None:
        return SGLANG_ROUTER, f"{installed} {'was asked for' if requested == SGLANG_ROUTER else 'is installed'}"
    if requested == SGLANG_ROUTER:
        raise UserError(router_not_installed(config))
    return BUILTIN, "sglang-router is not installed"


def installed_sglang(config: Config) -> InstalledPackage:
    """SGLang with its options, for a run that uses it."""
    installed = find_installed(SGLANG, config.sglang_python)
    if installed is None:
        raise UserError(_not_installed(config))
    return installed


def _not_installed(config: Config) -> str:
    where = config.sglang_python or "this interpreter"
    return (
        f"--rollout-backend sglang: SGLang is not installed in {where}; install it with pip install 'slime[sglang]', "
        "name an interpreter that has it with --sglang-python, or use --rollout-backend embedded"
    )
