"""The inference engines: which kind, and the limits of the embedded one."""

from dataclasses import dataclass

from slime.config.flag import above, at_least, between, flag


@dataclass(frozen=True, kw_only=True)
class EngineFlags:
    """Engine: who generates tokens"""

    rollout_backend: str = flag(
        "auto",
        "inference engine; auto: the embedded one (launching SGLang servers is not in this version)",
        choices=("auto", "embedded", "sglang"),
    )
    rollout_compile: bool | None = flag(None, "embedded engine: use torch.compile", derived="on for CUDA")
    engine_max_running_requests: int = flag(256, "embedded engine: sequences decoded together", check=at_least(1))
    engine_max_total_tokens: int | None = flag(
        None, "embedded engine: KV-cache capacity in tokens", check=at_least(16), derived="from the free memory"
    )
    engine_chunked_prefill_size: int = flag(8192, "embedded engine: prompt tokens per prefill pass", check=at_least(16))
    engine_mem_fraction: float = flag(
        0.3,
        "embedded engine: part of the free GPU memory for the KV cache",
        check=between(0, 1, low_open=True, high_open=True),
    )
    engine_start_timeout: float = flag(600.0, "seconds until a started engine must answer", check=above(0))
    engine_request_timeout: float = flag(3600.0, "seconds until one request must be answered", check=above(0))
    engine_port: int | None = flag(
        None, "port of the first engine, the next ones follow", check=between(1, 65535), derived="free ports"
    )
