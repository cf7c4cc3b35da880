"""Reads JSON bodies: `POST /generate`, in SGLang's form, into sequences, and the bodies of control calls.

Invariant: a request that parses can be served: its tokens are in the vocabulary, it fits the context with room for one
more token, and every field it sets is supported or cannot change a token. Anything else is a `BadRequest` that names
the problem. The parsed arguments of control calls have the right types throughout, so the commands need not check them.
"""

from __future__ import annotations

import base64
import binascii
import re
import secrets
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import orjson
from aiohttp import web

from slime.cluster.memory.cuda_driver import IPC_HANDLE_BYTES
from slime.engine.embedded.errors import BadRequest, IgnoredFields, is_neutral, shown
from slime.engine.embedded.model.cpu_sampler import stream_seed
from slime.engine.embedded.sampling_params import SamplingParams, parse_sampling_params
from slime.engine.embedded.scheduler import Sequence
from slime.engine.embedded.tokenizer import EngineTokenizer, NoTokenizer, TextStream
from slime.engine.embedded.weights.ipc import DeviceMemory, HostMemory
from slime.engine.embedded.weights.process_groups import DTYPES, AnnouncedBucket, Rendezvous
from slime.models.openai_api import Field
from slime.models.peft_adapter import AdapterConfig, BadAdapter

if TYPE_CHECKING:  # importing transformers takes longer than a start without it
    from transformers import PreTrainedTokenizerBase

_KNOWN = {"text", "input_ids", "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num", "rid",
          "stream", "return_text_in_logprobs", "return_routed_experts", "routed_experts_start_len"}  # fmt: skip
_UNSUPPORTED = {"image_data", "audio_data", "video_data", "lora_path", "input_embeds", "token_ids_logprob",
                "return_hidden_states", "session_params", "custom_logit_processor"}  # fmt: skip
_WITHOUT_EFFECT = {"background", "priority", "log_metrics", "bootstrap_host", "bootstrap_port", "bootstrap_room",
                   "data_parallel_rank", "routed_dp_rank", "disagg_prefill_dp_rank", "routing_key", "extra_key",
                   "conversation_id", "custom_labels", "external_trace_header", "received_time",
                   "require_reasoning", "no_logs", "custom_params", "user", "metadata"}  # fmt: skip
"""Fields about the client, priority, routing and logging: they change no token."""
_MOST_TOP = 128

_GROUP = "weight_update_group"
_MEMORY = ("weights", "kv_cache", "cuda_graph")
_MOST = (1 << 31) - 1
_MOST_BUCKETS = 1 << 20


class RequestField(Field):
    """A JSON value of a request body; its errors name the outermost field as their `param`."""

    __slots__ = ()

    def bad(self, why: str) -> BadRequest:
        return BadRequest(f"{self.path} {why}", None if self.is_body else re.split(r"[.\[]", self.path)[0])

    def must_be(self, expected: str) -> Exception:
        return self.bad(f"is missing: give {expected}") if self.value is None else super().must_be(expected)

    @staticmethod
    def described(value: object) -> str:
        return shown(value)


async def json_body(request: web.Request, *, optional: bool = False) -> RequestField:
    """Parse the JSON object in a body; numbers are finite, integers have 64 bits, nesting is bounded."""
    raw = await request.read()
    try:
        body = {} if not raw and optional else orjson.loads(raw)
    except orjson.JSONDecodeError as cause:
        raise BadRequest(f"the body is not JSON: {cause}") from cause
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return RequestField(body)


@dataclass(frozen=True)
class ModelFacts:
    """Facts about the served model that the parser needs."""

    tokenizer: EngineTokenizer
    vocab_size: int
    context_len: int
    eos_ids: frozenset[int]
    has_experts: bool = False
    chat_tokenizer: Callable[[], PreTrainedTokenizerBase] | None = field(default=None, compare=False)
    """Loads transformers' tokenizer; the first call may take seconds."""
    left_out: IgnoredFields = field(default_factory=IgnoredFields, compare=False)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Encode a prompt; a text that is certainly too long is refused before it is tokenised."""
        most = self.context_len * self._longest_token
        if len(text) > most:
            raise BadRequest(f"the prompt has {len(text)} characters, the context holds {self.context_len} tokens")
        return self.tokenizer.encode(text, add_special_tokens=special)

    @cached_property
    def _longest_token(self) -> int:
        """Upper limit of the characters of one token, with a margin for tokenizers that drop some of the text."""
        return 8 * max(len(token) for token in self.tokenizer.get_vocab())


@dataclass(frozen=True)
class GenerateRequest:
    """A valid request for the `n` samples of one prompt."""

    rid: str
    input_ids: list[int]
    params: SamplingParams
    return_logprob: bool
    logprob_start: int | None
    top_logprobs: int
    stream: bool
    routed_from: int | None

    def sequences(self, facts: ModelFacts, notify: Callable[[Sequence], object]) -> list[Sequence]:
        """Make a sequence for each of the `n` samples."""
        p = self.params
        stops = p.stop_token_ids if p.ignore_eos else p.stop_token_ids | facts.eos_ids
        room = facts.context_len - len(self.input_ids)
        made = []
        for choice in range(p.n):
            text = None
            if self.stream or p.stop:
                text = TextStream(
                    facts.tokenizer, p.stop, skip_special_tokens=p.skip_special_tokens, streamed=self.stream
                )
            made.append(
                Sequence(
                    self.rid,
                    self.input_ids,
                    p,
                    stops,
                    min(p.max_new_tokens, room),
                    notify,
                    choice,
                    secrets.randbits(64) if p.sampling_seed is None else stream_seed(p.sampling_seed, choice),
                    self.stream,
                    text,
                    self.logprob_start,
                    self.top_logprobs,
                    self.routed_from,
                )
            )
        return made


def parse_generate(body: object, facts: ModelFacts) -> tuple[list[GenerateRequest], bool]:
    """Return the requests in a body, and whether the answer is a list since a batch was sent."""
    body = RequestField(body).object()
    for name in sorted(body.keys() - _KNOWN):
        if name not in _WITHOUT_EFFECT and not is_neutral(body[name]):
            if name in _UNSUPPORTED:
                raise BadRequest(f"{name} is not supported by the embedded engine", name)
            known = ", ".join(sorted(_KNOWN))
            raise BadRequest(f"unknown field {shown(name)}, which may change what is sampled; known are {known}", name)
        facts.left_out.note(name)
    if (body.get("text") is None) == (body.get("input_ids") is None):
        raise BadRequest("give exactly one of text and input_ids")
    text, prompts = body.get("text"), body.get("input_ids")
    if text is not None:
        batched = isinstance(text, list)
        texts = text if batched else [text]
        if not texts or not all(isinstance(t, str) for t in texts):
            raise BadRequest("text must be a string or a non-empty list of strings")
        prompts = [facts.encode(t) for t in texts]
    elif not isinstance(prompts, list):
        raise BadRequest("input_ids must be a list of token ids, or a list of such lists")
    else:
        batched = bool(prompts) and isinstance(prompts[0], list)
        prompts = prompts if batched else [prompts]
    per_prompt: dict[str, list[object]] = {}
    for name in _KNOWN - {"text", "input_ids"}:  # a batch may give a field once, or once for each prompt
        value = body.get(name)
        if not batched or not isinstance(value, list):
            if batched and name == "rid" and value is not None and len(prompts) > 1:
                raise BadRequest("a batch needs a list of rids, one per prompt")
            value = [value] * len(prompts)
        elif len(value) != len(prompts):
            raise BadRequest(f"{name} has {len(value)} entries for {len(prompts)} prompts")
        per_prompt[name] = value
    return [
        _parse_request(ids, RequestField({name: values[at] for name, values in per_prompt.items()}), facts)
        for at, ids in enumerate(prompts)
    ], batched


def _parse_request(ids: object, fields: RequestField, facts: ModelFacts) -> GenerateRequest:
    """Check the fields of one prompt."""
    if not isinstance(ids, list) or not ids:
        raise BadRequest("the prompt has no tokens", "input_ids")
    if not all(isinstance(t, int) and not isinstance(t, bool) for t in ids):
        raise BadRequest("input_ids must hold integers only", "input_ids")
    low, high = min(ids), max(ids)
    if low < 0 or high >= facts.vocab_size:
        wrong = low if low < 0 else high
        raise BadRequest(f"token id {wrong} is outside the vocabulary of {facts.vocab_size}", "input_ids")
    params = parse_sampling_params(
        fields["sampling_params"].value, vocab_size=facts.vocab_size, left_out=facts.left_out
    )
    if params.stop and isinstance(facts.tokenizer, NoTokenizer):
        raise facts.tokenizer.refusal("stop")
    if len(ids) >= facts.context_len and (params.max_new_tokens > 0 or len(ids) > facts.context_len):
        raise BadRequest(f"the prompt has {len(ids)} tokens, the context holds {facts.context_len}", "input_ids")
    return_logprob = fields["return_logprob"].flag()
    start = fields["logprob_start_len"].integer(-1, low=-1, high=1 << 31)
    if start >= len(ids):
        raise BadRequest(f"logprob_start_len {start} is after the prompt of {len(ids)} tokens", "logprob_start_len")
    top = fields["top_logprobs_num"].integer(0, low=0, high=min(_MOST_TOP, facts.vocab_size))
    routed_from: int | None = fields["routed_experts_start_len"].integer(0, low=0, high=1 << 31)
    if not fields["return_routed_experts"].flag():
        routed_from = None
    elif not facts.has_experts:
        raise BadRequest("return_routed_experts: this model has no routed experts", "return_routed_experts")
    elif routed_from is not None and routed_from >= len(ids):
        raise BadRequest(
            f"routed_experts_start_len {routed_from} is after the prompt of {len(ids)} tokens",
            "routed_experts_start_len",
        )
    return GenerateRequest(
        rid=fields["rid"].optional_text() or uuid.uuid4().hex,
        input_ids=ids,
        params=params,
        return_logprob=return_logprob,
        logprob_start=start if return_logprob and start >= 0 else None,
        top_logprobs=top if return_logprob else 0,
        stream=fields["stream"].flag(),
        routed_from=routed_from,
    )


def group_name(fields: RequestField) -> str:
    return fields["group_name"].text(_GROUP)


def rendezvous(fields: RequestField) -> Rendezvous:
    """Parse SGLang's `/init_weights_update_group`; rank 0 is the trainer, which sends."""
    address = fields["master_address"].text()
    if not re.fullmatch(r"[A-Za-z0-9._:%-]+", address):
        raise BadRequest(f"master_address must be a host name or an IP address, not {shown(address)}", "master_address")
    world_size = fields["world_size"].integer(low=2, high=1 << 16)
    return Rendezvous(
        name=group_name(fields),
        backend=fields["backend"].one_of(("nccl", "gloo"), "nccl"),
        address=address,
        port=fields["master_port"].integer(low=1, high=65535),
        rank=fields["rank_offset"].integer(low=1, high=world_size - 1),
        world_size=world_size,
    )


def shared_memory(fields: RequestField) -> DeviceMemory | HostMemory:
    """Parse a `region` of the host (a path), or device memory: CUDA's `handle` in base64, and an `offset` into it."""
    if "region" in fields:
        return HostMemory(fields["region"].text())
    given = fields["handle"].text()
    try:
        handle = base64.b64decode(given, validate=True)
    except (binascii.Error, ValueError) as cause:
        raise BadRequest(f"handle must be base64, not {shown(given)}", "handle") from cause
    if len(handle) != IPC_HANDLE_BYTES:
        raise BadRequest(f"handle must have {IPC_HANDLE_BYTES} bytes, not {len(handle)}", "handle")
    return DeviceMemory(handle, fields["offset"].integer(0, low=0, high=1 << 50), fields["device"].optional_text())


def parse_bucket(fields: RequestField) -> AnnouncedBucket:
    """Parse the announcement of a bucket: SGLang's fields, and two of ours.

    `bucket` is the bucket's number and the count of the update's buckets ([1, 3]: the first of three); `adapter` (`r`,
    `lora_alpha`, `base_dtype`) marks the tensors of a LoRA adapter.
    """
    names, dtypes = fields["names"].texts(), fields["dtypes"].texts()
    shapes = fields["shapes"].items()
    if not len(names) == len(dtypes) == len(shapes):
        raise BadRequest(
            f"names, dtypes and shapes must have the same length, not {len(names)}, {len(dtypes)} and {len(shapes)}"
        )
    if wrong := [kind for kind in dtypes if kind not in DTYPES]:
        raise BadRequest(f"dtype {shown(wrong[0])} is not one of {', '.join(DTYPES)}", "dtypes")
    number, count = _integers(fields["bucket"].value or [1, 1], "bucket", _MOST_BUCKETS, exactly=2)
    if not 1 <= number <= count:
        raise BadRequest(f"bucket must be [number, count] with 1 <= number <= count, not {[number, count]}", "bucket")
    group = group_name(fields)
    checked_shapes = [_integers(shape.value, "shapes", _MOST) for shape in shapes]
    adapter: AdapterConfig | None = None
    if "adapter" in fields:
        try:
            adapter = AdapterConfig.from_dict(dict(fields["adapter"].object()))
        except BadAdapter as cause:
            raise BadRequest(f"adapter: {cause}", "adapter") from cause
    return AnnouncedBucket(group, names, [DTYPES[kind] for kind in dtypes], checked_shapes, number, count, adapter)


def memory_tags(fields: RequestField) -> list[str]:
    """Parse the `tags` of `/release_memory_occupation` and `/resume_memory_occupation`; SGLang's default is all."""
    if not fields["tags"].value:
        return list(_MEMORY)
    tags = fields["tags"].texts()
    if not set(tags) <= set(_MEMORY):
        raise BadRequest(f"tags must be among {', '.join(_MEMORY)}, not {shown(tags)}", "tags")
    return tags


def _integers(value: object, name: str, most: int, *, exactly: int | None = None) -> tuple[int, ...]:
    if (
        not isinstance(value, list)
        or not all(isinstance(v, int) and not isinstance(v, bool) and 0 <= v <= most for v in value)
        or exactly not in (None, len(value))
    ):
        raise BadRequest(f"{name} must hold lists of integers from 0 to {most}, not {shown(value)}", name)
    return tuple(value)
