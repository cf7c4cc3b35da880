"""Engines that somebody else runs (`--rollout-external-engine-addrs`): attached, updated, never started or stopped.

Invariant: after `attach` every address has answered as an engine that serves a model of the same architecture and
vocabulary as `--hf-checkpoint`; otherwise the run ends with the reason before anything was sent to any of them.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from slime.config import Config
from slime.engine.fleet.capabilities import Capabilities, probe
from slime.engine.http.key import engine_key
from slime.engine.http.plain_http import NoAnswer, ask
from slime.engine.launch import Launch
from slime.errors import RunFailed, UserError
from slime.models.folder import read_config_json

FLAG = "--rollout-external-engine-addrs"
_TIMEOUT_S = 30.0
_ASK_TIMEOUT_S = 10.0


class ExternalEngines:
    """The engines at the addresses of the flag, in the form of a fleet."""

    def __init__(self, config: Config) -> None:
        assert config.rollout_external_engine_addrs
        self._config = config
        self._addresses = [_url(address) for address in config.rollout_external_engine_addrs]
        self.size = len(self._addresses)
        if len(set(self._addresses)) != self.size:
            raise UserError(f"{FLAG} names an engine twice: {' '.join(config.rollout_external_engine_addrs)}")
        for flag, given in (("--offload-rollout", config.offload_rollout), ("--sglang-config", config.sglang_config)):
            if given:
                raise UserError(f"{flag} is about engines that the run starts itself: drop it, or drop {FLAG}")
        self.launches: list[Launch] = []

    @property
    def urls(self) -> list[str]:
        return list(self._addresses)

    def start(self) -> list[str]:
        """Look at every engine; returns `urls`."""
        self.launches = self._discovered(_TIMEOUT_S)
        return self.urls

    def ask(self) -> None:
        """Raise a `UserError` unless every engine answers soon, and serves the right model."""
        self._discovered(_ASK_TIMEOUT_S)

    def _discovered(self, timeout_s: float) -> list[Launch]:
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(lambda url: _discover(url, self._config, timeout_s), self._addresses))

    def check(self, within_s: float = 0.0) -> None:
        """Engines of others are not watched: a call that fails says so by itself."""

    def why_ended(self, index: int) -> str | None:
        """Not known here."""
        return None

    def restart(self, index: int) -> None:
        raise RunFailed(f"the engine at {self._addresses[index]} is not well, and it is not this run's to restart")

    def pids(self) -> list[int]:
        return []

    def stop(self) -> None:
        """Leave them as they are."""


def _url(address: str) -> str:
    host, colon, port = address.removeprefix("http://").rstrip("/").rpartition(":")
    if not colon or not host or not port.isdigit():
        raise UserError(f"{FLAG} {address}: give HOST:PORT")
    return f"http://{host}:{port}"


def _discover(url: str, config: Config, timeout_s: float) -> Launch:
    key = engine_key(config)
    try:
        found = probe(url, generate=False, timeout_s=timeout_s, api_key=key)
        _check_model(url, found, config.hf_checkpoint, timeout_s, key)
        info = ask("GET", f"{url}/server_info", timeout_s=timeout_s, api_key=key)[1]
    except (RunFailed, NoAnswer) as error:
        raise UserError(f"{FLAG}: {error}: start it (slime serve), or correct the address") from error
    host, _, port = url.removeprefix("http://").rpartition(":")
    mode = info.get("disaggregation_mode")
    worker_type = mode if mode in ("prefill", "decode") else "regular"
    bootstrap = info.get("disaggregation_bootstrap_port") if worker_type == "prefill" else None
    return Launch(url, host.strip("[]"), int(port), worker_type=worker_type, bootstrap_port=bootstrap)


def _check_model(url: str, found: Capabilities, hf_checkpoint: str, timeout_s: float, key: str | None) -> None:
    """Compare what the engine says, or what lies in its model folder where that can be read here."""
    ours = read_config_json(hf_checkpoint)
    theirs = _model_facts(url, found, timeout_s, key)
    for key, name in (("model_type", "architecture"), ("vocab_size", "vocabulary")):
        if theirs.get(key) is not None and theirs[key] != ours.get(key):
            raise UserError(
                f"{FLAG}: the engine at {url} serves {found.model_path} with {name} {theirs[key]}, but "
                f"--hf-checkpoint {hf_checkpoint} has {ours.get(key)}: start the engine with that model"
            )


def _model_facts(url: str, found: Capabilities, timeout_s: float, key: str | None) -> dict[str, Any]:
    folder = Path(found.model_path)
    if (folder / "config.json").is_file():
        return read_config_json(folder)
    status, answer = ask("GET", f"{url}/model_info", timeout_s=timeout_s, api_key=key)
    return answer if status == 200 and isinstance(answer, dict) else {}
