"""Who generates tokens: SGLang's server or the embedded engine, and why."""

from __future__ import annotations

from slime.config import Config
from slime.engine.sglang.installed import SGLANG, Installed, find_installed, installed_version
from slime.errors import UserError

EMBEDDED, SGLANG_SERVER, EXTERNAL = "embedded", "sglang", "external"


def choose_backend(config: Config, device: str) -> tuple[str, str]:
    """The engine to start for `--rollout-backend`, and why."""
    asked = config.rollout_backend
    if config.rollout_external_engine_addrs:
        return EXTERNAL, "--rollout-external-engine-addrs names engines that are only attached"
    if asked == EMBEDDED:
        return EMBEDDED, "asked for"
    if asked == "auto" and device != "cuda":
        return EMBEDDED, "there is no GPU for SGLang"
    version = installed_version(SGLANG, config.sglang_python)
    if version is not None:
        return SGLANG_SERVER, f"SGLang {version} {'was asked for' if asked == SGLANG_SERVER else 'is installed'}"
    if asked == "auto":
        return EMBEDDED, "SGLang is not installed"
    raise UserError(_not_installed(config))


def installed_sglang(config: Config) -> Installed:
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
