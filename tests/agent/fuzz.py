"""Hostile clients of the agent server, and a client that measures how long its own session takes meanwhile.

Both run in processes of their own: `python -m tests.agent.fuzz attack PORT SEED COUNT KEY...` prints the outcome, and
`... probe URL MODEL KEY...` the latencies in seconds when its standard input ends.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import aiohttp

from tests.engine.fuzz import WAYS, Outcome, Shot, as_json, bombard, damaged, mutated

HELD = 400
"""Connections that are kept open, idle or with half a request."""
TURNS_A_KEY = 1000
WARM_TURNS = 3
"""Turns before the attack, which are not measured."""
_TOOL = {"name": "add", "description": "d", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
_ASK = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is 12+34?"}]


def templates() -> list[tuple[str, str, Any]]:
    """Method, path and body of requests that the server would answer with a turn or a number."""
    chat = {"model": "default", "messages": [*_ASK, {"role": "assistant", "content": "", "tool_calls": [{
                "id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{\"a\": 1}"}}]},
                {"role": "tool", "tool_call_id": "call_1", "content": "46"}], "tools": [{"type": "function",
                "function": _TOOL}], "tool_choice": "auto", "max_tokens": 8, "temperature": 0.5, "stop": ["zz"],
            "logprobs": True, "stream": False, "stream_options": {"include_usage": True}}  # fmt: skip
    responses = {"model": "default", "instructions": "be brief", "input": [{"type": "message", "role": "user",
                    "content": [{"type": "input_text", "text": "12+34?"}]}], "tools": [{"type": "function", **_TOOL}],
                 "max_output_tokens": 8, "stream": False}  # fmt: skip
    messages = {"model": "default", "system": "be brief", "messages": [{"role": "user", "content": "12+34?"}],
                "max_tokens": 8, "tools": [{"name": "add", "input_schema": _TOOL["parameters"]}],
                "stream": False}  # fmt: skip
    counted = {name: value for name, value in messages.items() if name not in ("max_tokens", "stream")}
    posts = [
        *[("/v1/chat/completions", chat)] * 5, ("/v1/chat/completions", {**chat, "stream": True}),
        *[("/v1/responses", responses)] * 3, ("/v1/responses", {**responses, "stream": True}),
        *[("/v1/messages", messages)] * 3, ("/v1/messages", {**messages, "stream": True}),
        *[("/v1/messages/count_tokens", counted)] * 2,
    ]  # fmt: skip
    gets = ["/v1/models", "/v1/models/default", "/health", "/nowhere"]
    return [("POST", path, body) for path, body in posts] + [("GET", path, None) for path in gets]


def shots(seed: int, keys: list[str]) -> Iterator[Shot]:
    """Requests without end: with the key of a session, of none, or without one; one in a hundred is huge.

    Those that are held open have the first key: they use up what its session may have in flight.
    """
    rng, known = random.Random(seed), templates()
    ways = {**dict(WAYS), "slow": 4, "held": 8}
    while True:
        method, path, body = rng.choice(known)
        data = b"" if body is None else damaged(rng, as_json(mutated(rng, body)))
        if rng.random() < 0.01 and body is not None:
            data = _huge(rng, body)
        way = rng.choices(list(ways), list(ways.values()))[0]
        own = keys[0] if way == "held" else rng.choice(keys[1:])
        key = rng.choice([*[own] * 3, "guess", None])
        yield Shot(method, path, data, "application/json", way, key is not None, key)


def _huge(rng: random.Random, body: dict[str, Any]) -> bytes:
    size = rng.choice([1, 3, 6]) << 20
    kind = rng.choice(["text", "control", "word", "objects", "messages", "numbers", "not_json"])
    if kind == "not_json":
        return b'{"model": NaN, "x": [' + b"NaN," * (size // 4) + b"1]}"
    said = {
        "text": "the sum of 12 and 34; " * (size // 22),
        "control": "<|im_end|>" * (size // 10),
        "word": "x" * size,
        "objects": [{}] * (size // 4),
        "messages": [{"role": "user", "content": ""}] * (size // 32),
        "numbers": [0.5] * (size // 5),
    }[kind]
    name = "input" if "input" in body else "messages"
    if isinstance(said, str):
        return json.dumps({**body, name: [{"role": "user", "content": said}]}).encode()
    return json.dumps({**body, name: said}).encode()


async def attack(port: int, seed: int, count: int, keys: list[str]) -> Outcome:
    """Send `count` requests while many more connections are held open."""
    held: deque[socket.socket] = deque()

    def aimed() -> Iterator[Shot]:
        for shot in shots(seed, keys):
            if shot.way != "held":
                yield shot
                continue
            connection = socket.create_connection(("127.0.0.1", port), timeout=60)
            head = f"{shot.method} {shot.path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n"
            bearer = f"Authorization: Bearer {shot.key}\r\n" if shot.key else ""
            connection.sendall((head + bearer + "\r\n{").encode()[: len(shot.body) % 160])
            held.append(connection)
            if len(held) > HELD:
                held.popleft().close()
            yield replace(shot, way="dropped")

    try:
        return await bombard(port, "guess", aimed(), count, at_once=16)
    finally:
        for connection in held:
            connection.close()


async def probe(url: str, model: str, keys: list[str]) -> dict[str, Any]:
    """Latencies of turns and of counted prompts, until standard input ends; `late` is the machine's own delay."""
    over = asyncio.ensure_future(asyncio.to_thread(sys.stdin.read))
    turns: list[float] = []
    counts: list[float] = []
    late: list[float] = []
    wrong: list[str] = []
    is_cold = True
    async with aiohttp.ClientSession() as http:
        while not over.done():
            begun = time.perf_counter()
            await asyncio.sleep(0.005)
            late.append(time.perf_counter() - begun - 0.005)
            takes_turn = len(counts) >= 4 * len(turns)
            body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": "what is 12+34?"}]}
            path = "/v1/chat/completions" if takes_turn else "/v1/messages/count_tokens"
            headers = {"Authorization": f"Bearer {keys[min(len(turns) // TURNS_A_KEY, len(keys) - 1)]}"}
            begun = time.perf_counter()
            try:
                async with http.post(url + path, json=body, headers=headers) as response:
                    answer = await response.read()
                if response.status != 200:
                    wrong.append(f"{path}: {response.status} {answer[:200]!r}")
            except aiohttp.ClientError as error:
                wrong.append(f"{path}: {type(error).__name__}: {error}")
            (turns if takes_turn else counts).append(time.perf_counter() - begun)
            if is_cold and len(turns) == WARM_TURNS:
                is_cold = False
                late, counts = [], [0.0] * len(counts)
                print("warm", flush=True)
    return {"turns": turns[WARM_TURNS:], "counts": counts, "late": late, "wrong": wrong}


def main() -> None:
    kind, *rest = sys.argv[1:]
    if kind == "probe":
        url, model, *keys = rest
        print(json.dumps(asyncio.run(probe(url, model, keys))))
    else:
        port, seed, count, *keys = rest
        outcome = asyncio.run(attack(int(port), int(seed), int(count), keys))
        print(json.dumps({"statuses": dict(sorted(outcome.statuses.items())), "wrong": outcome.wrong[:20]}))


if __name__ == "__main__":
    main()
