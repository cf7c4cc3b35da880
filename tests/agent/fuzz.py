"""Hostile clients of the agent server, and a probe that measures the latencies of its own sessions during an attack.

Both run in separate processes: `python -m tests.agent.fuzz attack PORT SEED COUNT KEY...` prints the outcome, and
`... probe URL MODEL KEY...` prints the latencies in seconds when its standard input ends.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import sys
import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import aiohttp

from tests.engine.fuzz import WAYS, Outcome, Shot, as_json, bombard, damaged, mutated

HELD = 400
"""Number of connections kept open, idle or with half a request."""
TURNS_A_KEY = 1000
WARM_TURNS = 3
"""Turns before the attack, which are not measured."""
SLEEP_S = 0.005
Span = tuple[float, float]
"""Start and end time of a request or a sleep, in seconds."""
_TOOL = {"name": "add", "description": "d", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
_ASK = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is 12+34?"}]


def templates() -> list[tuple[str, str, Any]]:
    """Return method, path and body of the requests that the attack mutates."""
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
    """Yield requests without end, with a session's key, a wrong key or no key; one in a hundred is huge.

    Held requests have the first key, so that they use up the in-flight limit of its session.
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


def excesses(requests: Sequence[Span], sleeps: Sequence[Span]) -> list[float]:
    """Return the seconds of each request beyond the longest delay of an overlapping sleep; sleeps are disjoint."""
    begins, ends = [begin for begin, _ in sleeps], [end for _, end in sleeps]
    found = []
    for begin, end in requests:
        beside = sleeps[bisect_right(ends, begin) : bisect_left(begins, end)]
        found.append(end - begin - max(map(delay_of, beside), default=0.0))
    return found


def delay_of(sleep: Span) -> float:
    return sleep[1] - sleep[0] - SLEEP_S


async def _sleep_on(sleeps: list[Span]) -> None:
    """Record sleeps, whose delays measure the machine's own latency during the requests."""
    while True:
        begun = time.perf_counter()
        await asyncio.sleep(SLEEP_S)
        sleeps.append((begun, time.perf_counter()))


async def probe(url: str, model: str, keys: list[str]) -> dict[str, Any]:
    """Measure latencies of turns and token counts until standard input ends; `late` has the machine's own delays.

    `beyond` is the largest latency of a request beyond the machine's delay during that request.
    """
    over = asyncio.ensure_future(asyncio.to_thread(sys.stdin.read))
    turns: list[Span] = []
    counts: list[Span] = []
    sleeps: list[Span] = []
    wrong: list[str] = []
    warm_at = 0.0
    sleeping = asyncio.create_task(_sleep_on(sleeps))
    async with aiohttp.ClientSession() as http:
        while not over.done():
            await asyncio.sleep(SLEEP_S)
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
            (turns if takes_turn else counts).append((begun, time.perf_counter()))
            if not warm_at and len(turns) == WARM_TURNS:
                warm_at = time.perf_counter()
                print("warm", flush=True)
    await asyncio.sleep(2 * SLEEP_S)  # the sleep during the last request ends
    sleeping.cancel()
    turns, counts = ([span for span in spans if span[0] >= warm_at] for spans in (turns, counts))
    return {
        "turns": [end - begin for begin, end in turns],
        "counts": [end - begin for begin, end in counts],
        "late": [delay_of(sleep) for sleep in sleeps if sleep[0] >= warm_at],
        "beyond": max(excesses([*turns, *counts], sleeps)),
        "wrong": wrong,
    }


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
