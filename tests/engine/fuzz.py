"""Malformed, half-sent and aborted requests over every route of the embedded engine, from raw sockets.

The seed alone determines the requests. Most start as a valid request; then a value is replaced, the bytes are damaged
or the connection ends early.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import socket
import struct
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime.cluster.ports import free_port

_IDS = list(range(3, 20))
_NESTED = "(nested)"  # becomes 900 brackets once the body is text: Python's json does not nest that deep
HOSTILE: list[Any] = [
    None, True, False, 0, 1, -1, 2, 2**31, 2**53, 2**63 - 1, -(2**63), 2**64, 10**30, 0.5, -0.0, 1e-320, 1e308,
    float("nan"), float("inf"), "", "a", "\0", "²", "../../etc/passwd", "/dev/stdin", "a" * 5000, "\ud83d\ude00", [], {},
    [[]], [None], [1], [-1], ["a"], [["a"]], [{}], {"a": 1}, {"type": "text", "text": "x"}, [2**70], _NESTED,
    {"role": "user", "content": "x"}, [{"role": "user"}], [1, "a", None], {"0": 1e308}, {"-1": 1},
]  # fmt: skip
WAYS = (
    ("whole", 60), ("dropped", 14), ("half_head", 4), ("half_body", 8), ("long_length", 4), ("short_length", 4),
    ("bad_length", 2), ("bad_chunks", 3), ("chunked", 3), ("bad_gzip", 2), ("gzip", 2), ("first_bytes", 8),
    ("other_method", 4), ("garbage", 3), ("twice", 3),
)  # fmt: skip
"""Ways to send a request, with their weights."""


def templates(folder: Path) -> list[tuple[str, str, Any]]:
    """Method, path and body of calls that the engine accepts; none changes its tokens."""
    params = {"max_new_tokens": 4, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.01, "stop": ["zz", "y"],
              "stop_token_ids": [7], "n": 1, "sampling_seed": 3, "ignore_eos": True, "logit_bias": {"9": 1.5},
              "min_new_tokens": 1, "frequency_penalty": 0.1, "presence_penalty": 0.1, "repetition_penalty": 1.1,
              "skip_special_tokens": True, "no_stop_trim": False}  # fmt: skip
    generate = {"input_ids": _IDS, "sampling_params": params, "return_logprob": True, "logprob_start_len": 2,
                "top_logprobs_num": 2, "rid": "fuzz", "stream": False}  # fmt: skip
    chat = {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": [
                {"type": "text", "text": "12+34?"}]}, {"role": "assistant", "content": None, "tool_calls": [{
                "id": "1", "type": "function", "function": {"name": "add", "arguments": "{\"a\": 1}"}}]},
                {"role": "tool", "tool_call_id": "1", "content": "46"}], "max_tokens": 4, "temperature": 0.5, "n": 1,
            "stop": "x", "seed": 1, "logprobs": True, "top_logprobs": 1, "stream": False, "tools": [{"type": "function",
                "function": {"name": "add", "parameters": {"type": "object"}}}], "chat_template_kwargs": {"a": 1},
            "stream_options": {"include_usage": True}, "model": "m"}  # fmt: skip
    weights = sorted(str(path) for path in folder.glob("*.safetensors"))
    meeting = {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 0, "world_size": 1, "group_name": "g",
               "backend": "gloo"}  # fmt: skip
    bucket = {"names": ["lm_head.weight"], "dtypes": ["float32"], "shapes": [[320, 64]], "group_name": "g",
              "weight_version": "fuzz", "flush_cache": True, "bucket": [1, 1]}  # fmt: skip
    return [
        ("GET", "/health", None), ("GET", "/readiness", None), ("GET", "/health_generate", None),
        ("GET", "/server_info", None), ("GET", "/get_server_info", None), ("GET", "/model_info", None),
        ("GET", "/get_model_info", None), ("GET", "/v1/models", None), ("GET", "/get_weight_version", None),
        ("POST", "/flush_cache", {}), ("POST", "/get_weight_version", {}),
        *[("POST", "/generate", generate)] * 6, *[("POST", "/generate", {**generate, "stream": True})] * 4,
        ("POST", "/generate", {"text": ["what is", "12"], "sampling_params": params}),
        *[("POST", "/v1/chat/completions", chat)] * 4,
        *[("POST", "/v1/chat/completions", {**chat, "stream": True})] * 2,
        *[("POST", "/v1/completions", {"prompt": "what is", "max_tokens": 4, "logprobs": 2, "stream": False})] * 3,
        ("POST", "/abort_request", {"rid": "fuzz"}), ("POST", "/abort_request", {"abort_all": True}),
        ("POST", "/pause_generation", {"mode": "in_place"}), ("POST", "/continue_generation", {}),
        ("POST", "/release_memory_occupation", {"tags": ["weights", "kv_cache"]}),
        ("POST", "/resume_memory_occupation", {"tags": ["weights", "kv_cache"]}),
        ("POST", "/update_weights_from_disk", {"model_path": str(folder), "weight_version": "fuzz", "flush_cache": True}),
        ("POST", "/update_weights_from_tensor", {"load_format": "safetensors_file", "paths": weights,
                                                 "weight_version": "fuzz", "flush_cache": False}),
        ("POST", "/update_weights_from_tensor", b""),
        ("POST", "/init_weights_update_group", meeting), ("POST", "/update_weights_from_distributed", bucket),
        ("POST", "/destroy_weights_update_group", {"group_name": "g"}),
        ("POST", "/load_lora_adapter", {"lora_name": "a", "lora_path": str(folder), "weight_version": "fuzz"}),
        ("POST", "/unload_lora_adapter", {"lora_name": "a", "weight_version": "fuzz"}),
        ("POST", "/weights_checker", {"action": "checksum"}), ("GET", "/nowhere", None),
    ]  # fmt: skip


@dataclass(frozen=True)
class Shot:
    """One request: its bytes and the way they are sent."""

    method: str
    path: str
    body: bytes
    content_type: str
    way: str
    shows_key: bool = True
    key: str | None = None
    """Key that replaces the default one; None: default."""


def shots(seed: int, folder: Path) -> Iterator[Shot]:
    """Yields requests without end."""
    rng, known = random.Random(seed), templates(folder)
    ways, odds = [way for way, _ in WAYS], [odds for _, odds in WAYS]
    while True:
        method, path, body = rng.choice(known)
        kind = "application/json"
        if isinstance(body, bytes):
            data, kind = _bad_blob(rng), "application/octet-stream"
        else:
            data = b"" if body is None else damaged(rng, as_json(mutated(rng, body)))
        if rng.random() < 0.03:
            path += rng.choice(
                ["?weight_version=%00", "?a[]=%ff", "/../x", "%2e%2e/", "?flush_cache=maybe", "#x", "\u00e9"]
            )
        way = rng.choices(ways, odds)[0]
        if path.startswith("/init_") and b'"world_size": 1,' not in data:
            way = "dropped"  # it may wait for other group members for minutes
        yield Shot(method, path, data, kind, way, rng.random() < 0.95)


def as_json(body: Any) -> bytes:
    return json.dumps(body).replace(f'"{_NESTED}"', "[" * 900 + "]" * 900).encode()


def mutated(rng: random.Random, body: Any) -> Any:
    """`body` with one to three values replaced, dropped or added, at any depth."""
    if rng.random() < 0.15:
        return body
    if rng.random() < 0.05:
        return deepcopy(rng.choice(HOSTILE))
    changed = deepcopy(body)
    for _ in range(rng.randint(1, 3)):
        place = changed
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys or (isinstance(place, dict) and rng.random() < 0.1):
                break
            key = rng.choice(keys)
            if isinstance(place[key], dict | list) and place[key] and rng.random() < 0.6:
                place = place[key]
                continue
            if rng.random() < 0.1 and isinstance(place, dict):
                del place[key]
            else:
                place[key] = deepcopy(rng.choice(HOSTILE))
            break
        if isinstance(place, dict) and rng.random() < 0.1:
            place[rng.choice(["unknown", "", "\0", "n", "stream", "tokenize", "chat_template"])] = deepcopy(
                rng.choice(HOSTILE)
            )
    return changed


def damaged(rng: random.Random, data: bytes) -> bytes:
    if rng.random() > 0.08 or not data:
        return data
    at = rng.randrange(len(data))
    return rng.choice([
        data[:at], data + b"}", data[:at] + b"\xff\xfe" + data[at:], data.replace(b":", b"", 1), b"[" * 100_000,
        b"\xef\xbb\xbf" + data, b'{"input_ids": [' + b"9" * 6000 + b"]}", data.replace(b'"', b"'"), b"\0" * at,
        b'{"text": "\\ud800", "sampling_params": {"max_new_tokens": 1}}',
    ])  # fmt: skip


def _bad_blob(rng: random.Random) -> bytes:
    """Bytes that are not a safetensors file with tensors of this model."""
    dtype = rng.choice(["F4", "F8_E8M0", "F6_E2M3", "F32", "BF16", "Z9", 7])
    shape = rng.choice([[2], [], [0], [-1], [2**40], "x", [1.5]])
    name = rng.choice(["lm_head.weight", "nobody", "", "model.embed_tokens.weight", "\0"])
    header = json.dumps({name: {"dtype": dtype, "shape": shape, "data_offsets": rng.choice([[0, 1], [0, 8], [8, 0]])}})
    data = struct.pack("<Q", len(header)) + header.encode() + bytes(8)
    return rng.choice([data, data[: rng.randrange(len(data))], rng.randbytes(64), struct.pack("<Q", 2**62), b""])


@dataclass
class Outcome:
    """Counts of each status (0: not waited for), and all wrong answers."""

    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


async def bombard(port: int, key: str, aim: Iterator[Shot], count: int, *, at_once: int = 12) -> Outcome:
    """Send `count` requests, `at_once` at a time; wait for the answer of each complete one."""
    outcome, left = Outcome(), iter(range(count))

    async def work() -> None:
        for _ in left:
            shot = next(aim)
            try:
                async with asyncio.timeout(240):
                    status, answer = await _fire(port, key, shot)
                    if shot.path.startswith(("/pause", "/release")):  # otherwise all requests wait forever
                        await _fire(
                            port,
                            key,
                            _plain("/resume_memory_occupation", {"tags": ["weights", "kv_cache", "cuda_graph"]}),
                        )
                        await _fire(port, key, _plain("/continue_generation", {}))
            except TimeoutError:
                status, answer = 0, b"no answer"
                outcome.wrong.append(f"{shot}: no answer came")
            outcome.statuses[status] += 1
            if status >= 500 and status != 503:
                outcome.wrong.append(
                    f"{shot.method} {shot.path} {shot.way} {shot.body[:300]!r}: {status} {answer[:300]!r}"
                )

    await asyncio.gather(*(work() for _ in range(at_once)))
    return outcome


def _plain(path: str, body: Any) -> Shot:
    return Shot("POST", path, json.dumps(body).encode(), "application/json", "whole")


async def _fire(port: int, key: str, shot: Shot) -> tuple[int, bytes]:
    """Status and answer of one request; status 0 if its way has no answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset on close, no TIME_WAIT
    try:
        data = _bytes(shot, key)
        for piece in (data[:7], data[7:90], data[90:-3], data[-3:]) if shot.way == "slow" else (data,):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01 if shot.way == "slow" else 0)
        if shot.way in ("dropped", "half_head", "half_body", "long_length"):
            return 0, b""
        if shot.way == "first_bytes":
            await reader.read(32)
            return 0, b""
        answer = await reader.read()
        head = answer.split(b" ", 2)
        return (int(head[1]), answer) if len(head) > 1 and head[1].isdigit() else (0, answer)
    except ConnectionError:  # the server may reject a request before it has read all of it
        return 0, b""
    finally:
        writer.transport.abort()


def _bytes(shot: Shot, key: str) -> bytes:
    method, body, way = shot.method, shot.body, shot.way
    if way == "garbage":
        return body[:200] + b"\r\n\r\n" + bytes(range(256))
    if way == "other_method":
        method = {"GET": "DELETE", "POST": "PUT"}[method]
    head = f"{method} {shot.path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: {shot.content_type}\r\n".encode()
    head += f"Authorization: Bearer {shot.key or key}\r\n".encode() if shot.shows_key else b""
    if way in ("chunked", "bad_chunks"):
        size = b"%x" % len(body) if way == "chunked" else b"-zz"
        return head + b"Transfer-Encoding: chunked\r\n\r\n" + size + b"\r\n" + body + b"\r\n0\r\n\r\n"
    if way in ("gzip", "bad_gzip"):
        body = gzip.compress(body) if way == "gzip" else b"\x1f\x8b" + body
        head += b"Content-Encoding: gzip\r\n"
    lengths = {"long_length": str(len(body) + 99), "short_length": str(len(body) // 2), "bad_length": "-7"}
    whole = head + f"Content-Length: {lengths.get(way, str(len(body)))}\r\n\r\n".encode() + body
    if way == "half_head":
        return head[: len(head) // 2]
    if way == "half_body":
        return whole[: len(whole) - (len(body) + 1) // 2]
    return whole.replace(b"Connection: close\r\n", b"") + whole if way == "twice" else whole
