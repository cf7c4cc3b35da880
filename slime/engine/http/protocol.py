"""Types for the parts of SGLang's HTTP dialect that rollout uses.

Token ids and log-probs of a generation come only from ``meta_info.output_token_logprobs``, so the ids that are trained
on are the ids that were sampled. A response with another shape raises an `EngineProtocolError` that quotes it, at this
boundary and not three modules later.

The second half of the file joins the parts of a response that was aborted and continued.
"""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from slime.config import Config
from slime.config.flags.rollout import DEFAULT_RESPONSE_LEN
from slime.data.routed_experts import decode_expert_ids
from slime.engine.http.codec import token_columns
from slime.engine.http.errors import EngineProtocolError
from slime.storage.json_types import JsonMapping, JsonObject

PauseMode = Literal["abort", "in_place", "retract"]
QUOTED_CHARS = 400


def rollout_sampling_params(flags: Config) -> JsonObject:
    """Sampling parameters of training rollouts, as a plain dict that custom generate functions may edit."""
    params: JsonObject = {
        "temperature": flags.rollout_temperature,
        "top_p": flags.rollout_top_p,
        "top_k": flags.rollout_top_k,
        "stop": flags.rollout_stop,
        "stop_token_ids": flags.rollout_stop_token_ids,
        "skip_special_tokens": bool(flags.rollout_skip_special_tokens),
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }
    limit = flags.rollout_max_response_len
    params["max_new_tokens"] = DEFAULT_RESPONSE_LEN if limit is None else limit
    return params


def sampling_seed(*parts: int | str) -> int:
    """A 31-bit seed that depends only on ``parts``, so a resumed run samples the same tokens."""
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") & 0x7FFFFFFF


def generate_payload(input_ids: Sequence[int], sampling_params: JsonMapping) -> JsonObject:
    """Body of ``POST /generate`` for one token-exact request."""
    return {"input_ids": list(input_ids), "sampling_params": dict(sampling_params), "return_logprob": True}


def routed_experts_fields(start: int) -> JsonObject:
    """Fields of a ``/generate`` body that request the routed experts of the tokens from `start` on."""
    fields: JsonObject = {"return_routed_experts": True}
    return fields | {"routed_experts_start_len": start} if start else fields


@dataclass(frozen=True, kw_only=True)
class GenerateResult:
    """One finished ``/generate`` response; ``id_array`` and ``log_prob_array`` have the same length."""

    text: str
    id_array: np.ndarray
    log_prob_array: np.ndarray
    finish_type: str
    meta_info: JsonObject = field(repr=False)

    @property
    def token_ids(self) -> list[int]:
        """Sampled token ids, as a new list."""
        return self.id_array.tolist()

    @property
    def log_probs(self) -> list[float]:
        """Log-probs of the sampled tokens, as a new list."""
        return self.log_prob_array.tolist()

    @classmethod
    def from_json(cls, answer: object, *, url: str, call: str = "/generate") -> GenerateResult:
        """Validate and parse the response of an engine; raises `EngineProtocolError`."""

        def malformed(what: str) -> EngineProtocolError:
            return EngineProtocolError(url, call, f"gave an answer {what}: {quote(answer)}")

        if not isinstance(answer, dict):
            raise malformed("that is not an object")
        meta_info = answer.get("meta_info")
        if not isinstance(meta_info, dict):
            raise malformed("without meta_info")
        finish_reason = meta_info.get("finish_reason")
        if not isinstance(finish_reason, dict) or not isinstance(finish_reason.get("type"), str):
            raise malformed("without meta_info.finish_reason.type")
        entries = meta_info.get("output_token_logprobs")
        if entries is None and _count(meta_info, "completion_tokens") == 0:
            entries = []  # aborted while queued: nothing was sampled
        columns = token_columns(entries)
        if columns is None:
            raise malformed("whose meta_info.output_token_logprobs is not a list of [finite log-prob, token id, ...]")
        output_ids = answer.get("output_ids")
        if isinstance(output_ids, list) and output_ids != columns[0].tolist():
            raise malformed("whose output_ids differ from the ids in output_token_logprobs")
        if isinstance(experts := meta_info.get("routed_experts"), str):
            try:
                meta_info["routed_experts"] = decode_expert_ids(
                    experts
                )  # decoded off the event loop: it may be megabytes
            except ValueError:
                raise malformed("whose meta_info.routed_experts is not base64 of int32") from None
        text = answer.get("text", "")
        return cls(
            text=text if isinstance(text, str) else "",
            id_array=columns[0],
            log_prob_array=columns[1],
            finish_type=finish_reason["type"],
            meta_info=meta_info,
        )

    @classmethod
    def joined(cls, parts: Sequence[GenerateResult], text: str) -> GenerateResult:
        """Join the results of the requests that one answer took; its `meta_info` lacks the lists of log-probs."""
        metas = [{k: v for k, v in part.meta_info.items() if k not in _AS_ARRAYS} for part in parts]
        meta_info, sampled = metas[0], len(parts[0].id_array)
        for part, rest in zip(parts[1:], metas[1:], strict=True):
            meta_info = _join_meta_info(meta_info, rest, (sampled, len(part.id_array)))
            sampled += len(part.id_array)
        return replace(
            parts[-1],
            text=text,
            id_array=np.concatenate([part.id_array for part in parts]),
            log_prob_array=np.concatenate([part.log_prob_array for part in parts]),
            meta_info=meta_info,
        )


def quote(answer: object) -> str:
    """A response as shown in error messages: JSON where possible, truncated to a readable length."""
    text = answer if isinstance(answer, str) else json.dumps(answer, default=repr, ensure_ascii=False)
    return text if len(text) <= QUOTED_CHARS else f"{text[:QUOTED_CHARS]}... ({len(text)} characters)"


def error_message(body: str) -> str:
    """Extracts the message of an error body, in any of the forms SGLang uses; else returns the body itself."""
    try:
        parsed = json.loads(body)
    except json.JSONDecodeError:
        return quote(body.strip() or "(empty answer)")
    if isinstance(parsed, dict):
        error = parsed.get("error", parsed)
        if isinstance(error, str):
            return error
        if isinstance(error, dict) and isinstance(error.get("message"), str):
            return error["message"]
    return quote(parsed)


# -- responses that were aborted and continued -------------------------------------------------------------------

_SUMMED = ("completion_tokens", "e2e_latency", "spec_verify_ct", "spec_accept_token_num", "spec_draft_token_num")
_JOINED = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")
_AS_ARRAYS = ("output_token_logprobs", "input_token_logprobs")
"""Metadata that a joined `GenerateResult` has as arrays, or not at all."""
_TOP_P = (("top_p_token_ids", "top_p_token_offsets"), ("top_p_kept_token_ids", "top_p_kept_token_offsets"))


def record_origin(meta_info: JsonObject, request: JsonMapping, sent_with: str | None) -> None:
    """Record what a response leaves out: the weight version that the engine had when the request was sent
    (`sent_with`), if the response names only a later one; and the first token that has routed experts."""
    names_all = sent_with is None or meta_info.get("weight_versions")
    if not names_all and meta_info.get("weight_version") not in (None, sent_with):
        meta_info["first_weight_version"] = sent_with
    start = request.get("routed_experts_start_len")
    if start and meta_info.get("routed_experts") is not None:
        meta_info.setdefault("routed_experts_start_len", start)


def was_aborted(answer: object) -> bool:
    """Return true if a response ended by an abort."""
    meta_info = answer.get("meta_info") if isinstance(answer, Mapping) else None
    reason = meta_info.get("finish_reason") if isinstance(meta_info, Mapping) else None
    return (reason.get("type") if isinstance(reason, Mapping) else reason) == "abort"


def extract_token_ids(answer: JsonMapping) -> list[int] | None:
    """Token ids of a response; None if it does not contain them."""
    entries = answer["meta_info"].get("output_token_logprobs")
    columns = None if entries is None else token_columns(entries)
    if columns is not None:
        return columns[0].tolist()
    ids = answer.get("output_ids")
    if isinstance(ids, list):
        return list(ids)
    return [] if _count(answer["meta_info"], "completion_tokens") == 0 else None


def is_single_request(payload: object) -> bool:
    """Return true if a body requests one unstreamed response to one prompt: only such a response can be continued."""
    if not isinstance(payload, Mapping) or payload.get("stream"):
        return False
    params = payload.get("sampling_params") or {}
    if not isinstance(params, Mapping) or params.get("n", 1) != 1:
        return False
    ids = payload.get("input_ids")
    if ids is None:
        return isinstance(payload.get("text"), str)
    return isinstance(ids, list) and bool(ids) and not isinstance(ids[0], list)


def continued_params(params: JsonMapping, sampled: int) -> JsonObject:
    """Sampling parameters for the rest of a response that has `sampled` tokens: smaller limits, another seed."""
    left = dict(params)
    limit = params.get("max_new_tokens")
    left["max_new_tokens"] = max(0, (DEFAULT_RESPONSE_LEN if limit is None else limit) - sampled)
    if params.get("min_new_tokens"):
        left["min_new_tokens"] = min(left["max_new_tokens"], max(0, params["min_new_tokens"] - sampled))
    if sampled and params.get("sampling_seed") is not None:
        left["sampling_seed"] = sampling_seed(params["sampling_seed"], sampled)
    return left


def continued_payload(payload: JsonMapping, prompt_ids: Sequence[int], sampled: Sequence[int]) -> JsonObject:
    """The request for the rest of a response: `payload` is the original request, `sampled` the ids received."""
    rest = {name: value for name, value in payload.items() if name not in ("text", "logprob_start_len")}
    rest["input_ids"] = [*prompt_ids, *sampled]
    rest["sampling_params"] = continued_params(payload.get("sampling_params") or {}, len(sampled))
    return rest


def join_responses(first: JsonMapping, rest: JsonMapping) -> JsonObject:
    """Join two parts of one response into the response of an uninterrupted request."""
    counts = len(extract_token_ids(first) or ()), len(extract_token_ids(rest) or ())
    meta_info = _join_meta_info(first["meta_info"], rest["meta_info"], counts)
    joined = {**first, **rest, "text": first.get("text", "") + rest.get("text", ""), "meta_info": meta_info}
    if "output_ids" in first or "output_ids" in rest:
        joined["output_ids"] = [*(first.get("output_ids") or ()), *(rest.get("output_ids") or ())]
    return joined


def _join_meta_info(one: JsonMapping, two: JsonMapping, counts: tuple[int, int]) -> JsonObject:
    """Join the metadata of two parts that have `counts` tokens.

    `weight_versions` of the result has the weight version of each token span: `version` from `start` up to `end`;
    neighbours differ. It is empty if an engine does not name its versions.
    """
    meta_info = {**one, **two}
    for name in ("id", "prompt_tokens", "input_token_logprobs", "input_top_logprobs", "first_weight_version"):
        if name in one:
            meta_info[name] = one[name]
    for name in _SUMMED:
        if name in one or name in two:
            meta_info[name] = (one.get(name) or 0) + (two.get(name) or 0)
    cached = _count(one, "cached_tokens") + _count(two, "cached_tokens")
    meta_info["cached_tokens"] = min(cached, _count(one, "prompt_tokens"))
    for name in _JOINED:
        if name in one or name in two:
            meta_info[name] = [*(one.get(name) or ()), *(two.get(name) or ())]
    for ids, offsets in _TOP_P:
        if offsets in one and offsets in two:
            first_ids, first_offsets = _int32_list(one[ids]), _int32_list(one[offsets])
            rest_offsets = [offset + len(first_ids) for offset in _int32_list(two[offsets])[1:]]
            meta_info[ids] = first_ids + _int32_list(two[ids])
            meta_info[offsets] = first_offsets + rest_offsets
    spans: list[JsonObject] = []
    for part, count, shift in ((one, counts[0], 0), (two, counts[1], counts[0])):
        version = part.get("first_weight_version", part.get("weight_version"))
        for span in part.get("weight_versions") or [{"version": version, "start": 0, "end": count}]:
            start, end = span["start"] + shift, span["end"] + shift
            if end <= start:
                continue
            if spans and (spans[-1]["version"], spans[-1]["end"]) == (span["version"], start):
                spans[-1]["end"] = end
            else:
                spans.append({"version": span["version"], "start": start, "end": end})
    meta_info["weight_versions"] = [] if any(span["version"] is None for span in spans) else spans
    return meta_info


def _int32_list(value: str | Sequence[int]) -> list[int]:
    """Decode integers that are sent as a list or as base64 of int32."""
    if not isinstance(value, str):
        return [int(number) for number in value]
    raw = base64.b64decode(value)
    return list(struct.unpack(f"<{len(raw) // 4}i", raw))


def _count(meta_info: JsonMapping, key: str) -> int:
    value = meta_info.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
