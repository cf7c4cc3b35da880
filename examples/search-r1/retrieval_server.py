"""The retrieval server of Search-R1, over BM25.

python examples/search-r1/retrieval_server.py --corpus FILE [--port N]

`POST /retrieve` takes `{"queries": [...], "topk": 3, "return_scores": true}` and answers, with one list a query,
`{"result": [[{"document": {"contents": ...}, "score": ...}, ...], ...]}`. The corpus has one `{"contents":
"title\\ntext"}` a line. Prints its URL once it serves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from aiohttp import web

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bm25 import Bm25

MOST = 100


def make_app(index: Bm25) -> web.Application:
    """The server for an index."""

    async def retrieve(request: web.Request) -> web.Response:
        try:
            queries, top, with_scores = _asked(await request.json())
        except ValueError as error:
            return web.json_response({"error": str(error)}, status=400)
        found = [[_entry(score, text, with_scores) for score, text in index.search(query, top)] for query in queries]
        return web.json_response({"result": found})

    app = web.Application(client_max_size=1 << 20)
    app.router.add_post("/retrieve", retrieve)
    return app


def _asked(body: Any) -> tuple[list[str], int, bool]:
    queries = body.get("queries") if isinstance(body, dict) else None
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise ValueError("the body must be an object with a list of texts as its 'queries'")
    top = body.get("topk") or 3
    if not isinstance(top, int) or not 0 < top <= MOST:
        raise ValueError(f"'topk' must be a number from 1 to {MOST}, not {top!r:.40}")
    return queries, top, bool(body.get("return_scores"))


def _entry(score: float, text: str, with_score: bool) -> dict[str, Any]:
    entry: dict[str, Any] = {"document": {"contents": text}}
    return entry | {"score": score} if with_score else entry


async def serve(app: web.Application, host: str, port: int) -> None:
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    await site.start()
    bound = runner.addresses[0][1]
    print(f"http://{host}:{bound}/retrieve", flush=True)
    # Whoever started this server holds the other end of its standard input: when that closes, nobody needs it any more.
    await asyncio.to_thread(sys.stdin.buffer.read)
    await runner.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="default: a free one")
    args = parser.parse_args()
    documents = [
        json.loads(line)["contents"] for line in args.corpus.read_text(encoding="utf-8").split("\n") if line.strip()
    ]
    asyncio.run(serve(make_app(Bm25(documents)), args.host, args.port))


if __name__ == "__main__":
    main()
