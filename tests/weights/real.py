"""Queries to real engines."""

from __future__ import annotations

from typing import Any

from slime.engine.http.client import EngineClient


def log_probs(client: EngineClient, run_async: Any, tokens: list[int]) -> tuple[list[float], str]:
    """Return the log-probs of the tokens after the first, and the weight version that scored them."""
    payload = {
        "input_ids": tokens,
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    meta = run_async(client.generate(payload))["meta_info"]
    return [entry[0] for entry in meta["input_token_logprobs"][1:]], meta["weight_version"]


def checksums(client: EngineClient, run_async: Any) -> dict[str, str]:
    """Return the checksum of every tensor of the engine."""
    found: dict[str, str] = run_async(client.check_weights("checksum"))["checksums"]
    return found
