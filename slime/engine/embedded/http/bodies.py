"""The bodies of control calls, from JSON to what the engine's commands take.

Invariant: what is made here has the right types throughout, so that a command that gets it cannot stumble over them.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import Any

from slime.cluster.memory.cuda_driver import IPC_HANDLE_BYTES
from slime.engine.embedded.http.fields import Fields
from slime.engine.embedded.refusals import BadRequest, shown
from slime.engine.embedded.weights.groups import DTYPES, Announced, Rendezvous
from slime.engine.embedded.weights.shared import DeviceMemory, HostMemory
from slime.models.peft_adapter import AdapterFacts, BadAdapter

_GROUP = "weight_update_group"
_MEMORY = ("weights", "kv_cache", "cuda_graph")
_MOST = (1 << 31) - 1
_MOST_BUCKETS = 1 << 20


def group_name(fields: Fields) -> str:
    return fields.string("group_name", _GROUP)


def rendezvous(fields: Fields) -> Rendezvous:
    """SGLang's `/init_weights_update_group`; rank 0 is the trainer, which sends."""
    address = fields.string("master_address")
    if not re.fullmatch(r"[A-Za-z0-9._:%-]+", address):
        raise BadRequest(f"master_address must be a host name or an IP address, not {shown(address)}", "master_address")
    world_size = fields.integer("world_size", low=2, high=1 << 16)
    return Rendezvous(
        name=group_name(fields),
        backend=fields.one_of("backend", ("nccl", "gloo"), "nccl"),
        address=address,
        port=fields.integer("master_port", low=1, high=65535),
        rank=fields.integer("rank_offset", low=1, high=world_size - 1),
        world_size=world_size,
    )


def shared_memory(fields: Fields) -> DeviceMemory | HostMemory:
    """A `region` of the host by its path, or device memory: CUDA's `handle` in base64, and an `offset` into it."""
    if "region" in fields:
        return HostMemory(fields.string("region"))
    given = fields.string("handle")
    try:
        handle = base64.b64decode(given, validate=True)
    except (binascii.Error, ValueError) as cause:
        raise BadRequest(f"handle must be base64, not {shown(given)}", "handle") from cause
    if len(handle) != IPC_HANDLE_BYTES:
        raise BadRequest(f"handle must have {IPC_HANDLE_BYTES} bytes, not {len(handle)}", "handle")
    return DeviceMemory(handle, fields.integer("offset", 0, low=0, high=1 << 50), fields.optional_string("device"))


def announced(fields: Fields) -> Announced:
    """SGLang's fields, and two of ours: `bucket` ([1, 3]: the first of three) says that an update goes on, `adapter`
    (`r`, `lora_alpha`, `base_dtype`) that the tensors are those of a LoRA adapter."""
    names, dtypes = fields.strings("names"), fields.strings("dtypes")
    shapes = fields.body.get("shapes")
    if not isinstance(shapes, list):
        raise BadRequest(f"shapes must be a list of lists of integers, not {shown(shapes)}", "shapes")
    if not len(names) == len(dtypes) == len(shapes):
        raise BadRequest(f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes do not go together")
    if wrong := [kind for kind in dtypes if kind not in DTYPES]:
        raise BadRequest(f"dtype {shown(wrong[0])} is not among {', '.join(DTYPES)}", "dtypes")
    number, count = _integers(fields.body.get("bucket") or [1, 1], "bucket", _MOST_BUCKETS, exactly=2)
    if not 1 <= number <= count:
        raise BadRequest(f"bucket must be [number, count] with 1 <= number <= count, not {[number, count]}", "bucket")
    return Announced(
        group_name(fields),
        names,
        [DTYPES[kind] for kind in dtypes],
        [_integers(shape, "shapes", _MOST) for shape in shapes],
        number,
        count,
        _adapter_facts(fields.body.get("adapter")),
    )


def _adapter_facts(given: object) -> AdapterFacts | None:
    if given is None:
        return None
    if not isinstance(given, dict):
        raise BadRequest(f"adapter must be an object with r and lora_alpha, not {shown(given)}", "adapter")
    try:
        return AdapterFacts.from_dict(given)
    except BadAdapter as cause:
        raise BadRequest(f"adapter: {cause}", "adapter") from cause


def memory_tags(fields: Fields) -> list[str]:
    """What `/release_memory_occupation` and its undoing are about; SGLang's default is everything."""
    if not fields.body.get("tags"):
        return list(_MEMORY)
    tags = fields.strings("tags")
    if not set(tags) <= set(_MEMORY):
        raise BadRequest(f"tags must be among {', '.join(_MEMORY)}, not {shown(tags)}", "tags")
    return tags


def _integers(value: Any, name: str, most: int, *, exactly: int | None = None) -> tuple[int, ...]:
    if (
        not isinstance(value, list)
        or not all(isinstance(v, int) and not isinstance(v, bool) and 0 <= v <= most for v in value)
        or exactly not in (None, len(value))
    ):
        raise BadRequest(f"{name} must hold lists of integers from 0 to {most}, not {shown(value)}", name)
    return tuple(value)
