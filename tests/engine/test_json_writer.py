"""The answer writer thread: incremental token JSON, batched decoding and isolated failures."""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web

from slime.cluster.http_server import Connections
from slime.engine.embedded.__main__ import bind, listen, shorten_switch_interval
from slime.engine.embedded.http.json_writer import AnswerWriter
from slime.engine.embedded.http.requests import GenerateRequest
from slime.engine.embedded.http.responses import TokenJson, answer, final_text, whole
from slime.engine.embedded.sampling_params import SamplingParams
from slime.engine.embedded.scheduler import Sequence
from slime.engine.embedded.tokenizer import FinalText


class NumberTokenizer:
    """A tokenizer that decodes ids to numbers, raises for 13 and counts its calls."""

    def __init__(self) -> None:
        self.together = self.alone = 0

    def batch_decode(self, lists: list[list[int]], *, skip_special_tokens: bool) -> list[str]:
        self.together += 1
        return [self._text(ids) for ids in lists]

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        self.alone += 1
        return self._text(ids)

    def _text(self, ids: list[int]) -> str:
        if 13 in ids:
            raise ValueError("no token 13")
        return " ".join(map(str, ids))


def sequence(count: int) -> Sequence:
    """A sequence with `count` of 1,000 tokens."""
    seq = Sequence("a", [1], SamplingParams(), frozenset(), 1000, notify=lambda _: None)
    grow(seq, count)
    return seq


def grow(seq: Sequence, count: int) -> None:
    for at in range(len(seq.output_ids), len(seq.output_ids) + count):
        seq.append(at, -at / 7, "3")


def plain_final_text(*ids: int) -> FinalText:
    return FinalText(list(ids), None, skip_special_tokens=True, keep_stop=False, cut=None)


def test_incremental_token_json_matches_the_full_answer() -> None:
    writer, seq = AnswerWriter(NumberTokenizer), sequence(200)
    [written] = writer.watch([seq])
    deadline = time.monotonic() + 120
    while written.count < 200 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert written.count == 200
    grow(seq, 800)
    writer.forget([seq])
    written.catch_up(seq)
    request = GenerateRequest("a", [1], seq.params, True, None, 0, False, None)
    made = orjson.loads(orjson.dumps(answer(seq, whole(seq, "text"), request, "", written)))
    assert made["output_ids"] == list(range(1000))
    assert made["meta_info"]["output_token_logprobs"] == [[-at / 7, at, None] for at in range(1000)]
    assert made == orjson.loads(orjson.dumps(answer(seq, whole(seq, "text"), request, "")))


def test_empty_token_json_is_empty_lists() -> None:
    assert orjson.dumps([TokenJson().ids, TokenJson().entries]) == b"[[],[]]"


def test_stop_token_is_excluded_from_the_text() -> None:
    seq = sequence(3)
    seq.end({"type": "stop", "matched": 2})
    assert FinalText.together(NumberTokenizer(), [final_text(seq), plain_final_text(5)]) == ["0 1", "5"]


def test_pending_texts_are_decoded_in_one_batch_and_fail_separately() -> None:
    words = NumberTokenizer()

    async def ask(*tokens: list[int]) -> list[Any]:
        writer, ended = AnswerWriter(lambda: words), []
        for ids in tokens:
            ended.append(sequence(0))
            ended[-1].output_ids = ids
            ended[-1].end({"type": "length", "length": len(ids)})
        with writer._news:  # the writer starts only when all texts are queued
            asked = [asyncio.ensure_future(writer.make([seq], lambda found: found[0])) for seq in ended]
            await asyncio.sleep(0)
        return await asyncio.gather(*asked, return_exceptions=True)

    assert asyncio.run(ask([1, 2], [3], [4])) == ["1 2", "3", "4"]
    assert (words.together, words.alone) == (1, 0)
    first, failed, last = asyncio.run(ask([1], [13], [2]))
    assert (first, last) == ("1", "2")
    assert isinstance(failed, ValueError)


def test_listen_backlog_holds_hundreds_of_connections() -> None:
    limit = Path("/proc/sys/net/core/somaxconn")
    count = min(400, int(limit.read_text())) if limit.exists() else 128
    if count <= 128:
        pytest.skip(f"this machine lets {count} connections wait")

    async def connect() -> None:
        sock = bind("127.0.0.1", 0)
        connections = Connections(count)
        runner = await listen(web.Application(), sock, connections)
        clients = []
        try:
            for _ in range(count):  # the blocked event loop accepts none of them
                clients.append(socket.create_connection(sock.getsockname(), timeout=60))
        finally:
            for client in clients:
                client.close()
            await connections.aclose()
            await runner.cleanup()

    asyncio.run(connect())


def test_switch_interval_is_below_one_millisecond() -> None:
    before = sys.getswitchinterval()
    try:
        shorten_switch_interval()
        assert sys.getswitchinterval() < 0.001
    finally:
        sys.setswitchinterval(before)
