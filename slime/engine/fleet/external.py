"""External engines (`--rollout-external-engine-addrs`): attached and updated, never started or stopped.

Invariant: after `start` every address has answered as an engine that serves a model of the same architecture and
vocabulary as `--hf-checkpoint`; otherwise the run ends with the reason before anything was sent to any of them.

`probe` requests the capabilities of a running engine. Invariant: a feature that an engine lacks is either replaced by a
weaker one, with a sentence that names it, or refused before the first rollout. Nothing is assumed from a version
number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slime.config import Config
from slime.engine.http.blocking import KEY_VARIABLE, NoResponse, ask, engine_key
from slime.engine.launch import Launch
from slime.errors import RunFailed, UserError
from slime.models.folder import read_config_json
from slime.storage.json_types import JsonObject

EngineKind = Literal["embedded", "sglang"]
PAUSE_MODES = ("abort", "in_place", "retract")
UPDATE_ROUTES = {
    "disk": "/update_weights_from_disk",
    "tensor": "/update_weights_from_disk",
    "nccl": "/update_weights_from_distributed",
}
"""The SGLang route of each transport; shared memory is loaded as a folder, since SGLang's own route takes pickles."""
_EMBEDDED = "slime-embedded"
_PROBE = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}, "return_logprob": True}


@dataclass(frozen=True)
class Capabilities:
    """Features of one engine, as probed."""

    kind: EngineKind
    version: str
    model_path: str
    pause_modes: frozenset[str] = frozenset(PAUSE_MODES)
    transports: frozenset[str] = frozenset(UPDATE_ROUTES)
    releases_memory: bool = True
    echoes_weight_version: bool = True
    returns_log_probs: bool = True
    returns_routed_experts: bool = True

    def __str__(self) -> str:
        return f"{'SGLang' if self.kind == 'sglang' else 'the embedded engine'} {self.version}"


def probe(url: str, *, generate: bool = True, timeout_s: float = 60.0, api_key: str | None = None) -> Capabilities:
    """Probe one engine; `generate` samples one token to see the fields of its responses (not for disaggregated
    servers)."""
    info = _object(url, "/server_info", timeout_s, api_key)
    if info.get("engine") == _EMBEDDED:
        return Capabilities("embedded", str(info["version"]), str(info["model_path"]))
    version = str(info.get("version", "of unknown version"))
    described = _object(url, "/openapi.json", timeout_s, api_key, optional=True)
    routes = set(described.get("paths", {}))
    meta: JsonObject | None = None
    if generate:
        try:
            status, answer = ask("POST", f"{url}/generate", _PROBE, timeout_s=timeout_s, api_key=api_key)
        except NoResponse as error:
            raise RunFailed(f"engine {url} did not answer its first request: {error}") from error
        if status != 200 or not isinstance(answer, dict) or not isinstance(answer.get("meta_info"), dict):
            raise RunFailed(f"engine {url} answered its first request with status {status}: {str(answer)[:400]}")
        meta = answer["meta_info"]
    pause_modes: Iterable[str] = PAUSE_MODES
    if routes:
        pause_modes = ()
        if "/pause_generation" in described["paths"]:
            schema = described.get("components", {}).get("schemas", {}).get("PauseGenerationReqInput", {})
            pause_modes = schema.get("properties", {}).get("mode", {}).get("enum", ("abort",))
    return Capabilities(
        kind="sglang",
        version=version,
        model_path=str(info.get("model_path", "")),
        pause_modes=frozenset(pause_modes),
        transports=frozenset(name for name, route in UPDATE_ROUTES.items() if not routes or route in routes),
        releases_memory=not routes or "/release_memory_occupation" in routes,
        echoes_weight_version=meta is None or "weight_version" in meta,
        returns_log_probs=meta is None or isinstance(meta.get("output_token_logprobs"), list),
        returns_routed_experts=info.get("enable_return_routed_experts") is True,
    )


def drop_unsupported(config: Config, engines: Sequence[Capabilities]) -> tuple[Config, list[str]]:
    """The config that all these engines can serve, and a sentence for each replaced feature."""
    changes: JsonObject = {}
    sentences: list[str] = []
    for engine in engines:
        if not engine.returns_log_probs:
            raise RunFailed(f"{engine} returns no log-probs with its tokens, which training needs: use a newer version")
        if config.use_rollout_routing_replay and not engine.returns_routed_experts:
            raise UserError(
                f"--use-rollout-routing-replay: {engine} does not return the experts that its routers chose: start it "
                "with --enable-return-routed-experts"
            )
        if config.update_weight_pause_mode not in engine.pause_modes:
            changes["update_weight_pause_mode"] = "abort"
            sentences.append(
                f"{engine} cannot pause by {config.update_weight_pause_mode}: running requests are aborted at an "
                "update and continued by the rollout"
            )
        if config.update_weight_transport in set(UPDATE_ROUTES) - engine.transports:
            changes["update_weight_transport"] = "disk"
            sentences.append(
                f"{engine} takes no weights by {config.update_weight_transport}: they are sent through files instead"
            )
        if config.lora_rank and config.lora_sync == "adapter" and engine.kind == "sglang":
            changes["lora_sync"] = "merged"
            sentences.append(f"{engine} adds an adapter only in requests that name it: it gets the merged weights")
        if config.offload_rollout and not engine.releases_memory:
            changes["offload_rollout"] = False
            sentences.append(f"{engine} cannot release its memory: it keeps it during training")
        if not engine.echoes_weight_version:
            sentences.append(f"{engine} does not name the weight version of an answer: samples have none")
    return config.replace(**changes), list(dict.fromkeys(sentences))


def _object(url: str, path: str, timeout_s: float, api_key: str | None, *, optional: bool = False) -> JsonObject:
    try:
        status, answer = ask("GET", url + path, timeout_s=timeout_s, api_key=api_key)
    except NoResponse as error:
        raise RunFailed(f"engine {url} did not answer {path}: {error}") from error
    if status == 200 and isinstance(answer, dict):
        return answer
    if optional:
        return {}
    if status in (401, 403):
        how = "takes another API key than" if api_key is not None else "wants an API key: put it into"
        raise UserError(f"the engine at {url} {how} the environment variable {KEY_VARIABLE}")
    raise RunFailed(f"engine {url} answered {path} with status {status}: this is not a known dialect of SGLang")


FLAG = "--rollout-external-engine-addrs"


class ExternalEngines:
    """The external engines of a run, with the interface of a fleet."""

    def __init__(self, config: Config) -> None:
        assert config.rollout_external_engine_addrs
        self._config = config
        self.urls: list[str] = []
        for address in config.rollout_external_engine_addrs:
            host, colon, port = address.removeprefix("http://").rstrip("/").rpartition(":")
            if not colon or not host or not port.isdigit():
                raise UserError(f"{FLAG} {address}: give HOST:PORT")
            self.urls.append(f"http://{host}:{port}")
        self.size = len(self.urls)
        if len(set(self.urls)) != self.size:
            raise UserError(f"{FLAG} names an engine twice: {' '.join(config.rollout_external_engine_addrs)}")
        for flag, given in (("--offload-rollout", config.offload_rollout), ("--sglang-config", config.sglang_config)):
            if given:
                raise UserError(f"{flag} is for engines that the run starts itself: drop it, or drop {FLAG}")
        self.launches: list[Launch] = []

    def start(self, timeout_s: float = 30.0) -> list[str]:
        """Probe every engine; returns `urls`. A `UserError` names one that does not answer or serves another model."""
        with ThreadPoolExecutor(self.size) as pool:
            self.launches = list(pool.map(lambda url: _attach(url, self._config, timeout_s), self.urls))
        return self.urls

    def check(self, within_s: float = 0.0) -> None:
        """Does nothing: external engines are not monitored; a call to a dead engine raises."""

    def why_ended(self, index: int) -> str | None:
        """Always None: the processes of external engines are unknown."""
        return None

    def stop(self) -> None:
        """Does nothing: external engines keep running."""


def _attach(url: str, config: Config, timeout_s: float) -> Launch:
    """Probe an engine and describe it as a launch. Refuses an engine with another model, according to its model folder
    if that is readable here, else to /model_info."""
    key = engine_key(config)
    try:
        found = probe(url, generate=False, timeout_s=timeout_s, api_key=key)
        ours = read_config_json(config.hf_checkpoint)
        folder = Path(found.model_path)
        if (folder / "config.json").is_file():
            theirs = read_config_json(folder)
        else:
            status, answer = ask("GET", f"{url}/model_info", timeout_s=timeout_s, api_key=key)
            theirs = answer if status == 200 and isinstance(answer, dict) else {}
        for field, name in (("model_type", "architecture"), ("vocab_size", "vocabulary")):
            if theirs.get(field) is not None and theirs[field] != ours.get(field):
                raise UserError(
                    f"{FLAG}: the engine at {url} serves {found.model_path} with {name} {theirs[field]}, but "
                    f"--hf-checkpoint {config.hf_checkpoint} has {ours.get(field)}: start the engine with that model"
                )
        info = ask("GET", f"{url}/server_info", timeout_s=timeout_s, api_key=key)[1]
    except (RunFailed, NoResponse) as error:
        raise UserError(f"{FLAG}: {error}: start it (slime serve), or correct the address") from error
    host, _, port = url.removeprefix("http://").rpartition(":")
    mode = info.get("disaggregation_mode")
    worker_type = mode if mode in ("prefill", "decode") else "regular"
    bootstrap = info.get("disaggregation_bootstrap_port") if worker_type == "prefill" else None
    return Launch(url, host.strip("[]"), int(port), worker_type=worker_type, bootstrap_port=bootstrap)
