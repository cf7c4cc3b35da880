"""An engine that samples nothing: it answers `/generate` from a script at once, and remembers prefixes as others do.

    python benchmarks/scripted_engine.py --answer 200 --tail 17,18,2 --ids 300:8000

Prints its port. Each answer has `--answer` ids, drawn by the request's length alone, ends in those of `--tail` (a tool
call and the token that ends the turn), and says in `cached_tokens` how much of the prompt an engine with a prefix cache
of blocks of 16 tokens would have found there. With `--step` seconds, a streamed answer has one event for each token.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import numpy as np
import orjson
from aiohttp import web

BLOCK = 16


class PrefixCache:
    """The prefixes that were computed here, as hashes of their blocks, each over all before it."""

    def __init__(self) -> None:
        self._known: set[int] = set()

    def found(self, ids: np.ndarray) -> int:
        """How many of the first tokens are known; from now on all are."""
        known, count, before, chain = self._known, 0, True, 0
        for start in range(0, len(ids) - BLOCK + 1, BLOCK):
            chain = hash((chain, ids[start : start + BLOCK].tobytes()))
            before = before and chain in known
            count += BLOCK * before
            known.add(chain)
        return count


class ScriptedEngine:
    """The routes of an engine, as far as a session server uses them."""

    def __init__(self, answer: int, tail: list[int], low: int, high: int, step: float | None = None) -> None:
        self._answer, self._tail, self._range, self._step = answer, tail, (low, high), step
        self._cache = PrefixCache()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**30)
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/abort_request", self.nothing)
        for path in ("/health", "/server_info", "/model_info"):
            app.router.add_get(path, self.nothing)
        return app

    async def nothing(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        prompt = np.array(body["input_ids"], dtype=np.int32)
        ids = np.random.default_rng(len(prompt)).integers(*self._range, self._answer)
        ids[-len(self._tail) :] = self._tail
        cached = self._cache.found(prompt)
        self._cache.found(np.concatenate([prompt, ids.astype(np.int32)]))
        answer = self._spoken(ids.tolist(), len(prompt), cached)
        if not body.get("stream"):
            return web.Response(body=orjson.dumps(answer), content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if self._step is not None:
            await self._in_steps(response, answer)
        else:
            await response.write(b"data: " + orjson.dumps(answer) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _in_steps(self, response: web.StreamResponse, answer: dict[str, Any]) -> None:
        """Send an event for each token, `step` seconds apart, as an engine with `--incremental-streaming-output`."""
        assert self._step is not None
        meta, due = answer["meta_info"], asyncio.get_running_loop().time()
        for at, (token, entry) in enumerate(zip(answer["output_ids"], meta["output_token_logprobs"], strict=True)):
            own = meta | {"completion_tokens": at + 1, "output_token_logprobs": [entry]}
            if at + 1 < len(answer["output_ids"]):
                own["finish_reason"] = None
            event = {"text": "", "output_ids": [token], "meta_info": own}
            await response.write(b"data: " + orjson.dumps(event) + b"\n\n")
            due += self._step
            await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))

    def _spoken(self, ids: list[int], prompt_tokens: int, cached: int) -> dict[str, Any]:
        return {
            "text": "",
            "output_ids": ids,
            "meta_info": {
                "id": "scripted",
                "finish_reason": {"type": "stop", "matched": ids[-1]},
                "prompt_tokens": prompt_tokens,
                "cached_tokens": cached,
                "completion_tokens": len(ids),
                "weight_version": "0",
                "output_token_logprobs": [(-0.5, token, None) for token in ids],
            },
        }


async def serve(options: argparse.Namespace) -> None:
    low, high = map(int, options.ids.split(":"))
    tail = [int(token) for token in options.tail.split(",")]
    runner = web.AppRunner(ScriptedEngine(options.answer, tail, low, high, options.step).app(), access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answer", type=int, default=200, help="tokens of each answer")
    parser.add_argument("--tail", default="2", help="the ids that each answer ends in, with commas between")
    parser.add_argument("--ids", default="300:8000", help="the range that ids are drawn from")
    parser.add_argument("--step", type=float, help="seconds between the tokens of a streamed answer")
    asyncio.run(serve(parser.parse_args()))
