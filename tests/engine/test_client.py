"""The engine client, pool and router against scripted HTTP servers on loopback."""

import asyncio
import json
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from slime.cluster.ports import free_port
from slime.engine.http.client import (
    EngineClient,
    EngineFailed,
    EngineProtocolError,
    EngineRejected,
    EngineTimeout,
    EngineUnreachable,
)
from slime.engine.http.pool import EnginePool
from slime.engine.http.protocol import GenerateResult, rollout_sampling_params, sampling_seed
from slime.engine.http.router import Router

ANSWER = {
    "text": "ab",
    "output_ids": [5, 6],
    "meta_info": {
        "id": "x",
        "finish_reason": {"type": "stop", "matched": 6},
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "cached_tokens": 1,
        "weight_version": 7,
        "output_token_logprobs": [[-0.5, 5, None], [-0.25, 6, None]],
    },
}


class Server:
    """An HTTP server that passes every request to one handler and records (method, path, body)."""

    def __init__(self, handler):
        self.handler = handler
        self.seen = []
        self.app = web.Application()
        self.app.router.add_route("*", "/{path:.*}", self._handle)

    async def _handle(self, request):
        text = await request.text()
        self.seen.append((request.method, request.path, json.loads(text) if text else None))
        return await self.handler(request)

    @asynccontextmanager
    async def listening(self, port=0):
        runner = web.AppRunner(self.app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()


def answering(body=None, status=200, text=None):
    async def handler(request):
        if text is not None:
            return web.Response(text=text, status=status)
        return web.json_response(ANSWER if body is None else body, status=status)

    return Server(handler)


def call(server, use):
    """Run `use(client)` against a listening server and return its result."""

    async def main():
        async with server.listening(), EngineClient(server.url, timeout_s=120, control_timeout_s=120) as client:
            return await use(client)

    return asyncio.run(main())


# -- one engine -----------------------------------------------------------------------------------------------------


def test_generate_sends_the_payload_and_parses_the_answer():
    server = answering()
    payload = {"input_ids": [1, 2, 3], "sampling_params": {"temperature": 1.0}, "return_logprob": True}
    result = call(server, lambda client: client.generate_result(payload))
    assert server.seen == [("POST", "/generate", payload)]
    assert (result.text, result.token_ids, result.log_probs) == ("ab", [5, 6], [-0.5, -0.25])
    assert result.finish_type == "stop"
    assert result.meta_info == ANSWER["meta_info"]


def answer_with_meta(**meta_info):
    return {**ANSWER, "meta_info": {**ANSWER["meta_info"], **meta_info}}


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        ([1], "not an object"),
        ({"text": "x"}, "without meta_info"),
        (answer_with_meta(finish_reason=None), "finish_reason"),
        (answer_with_meta(finish_reason={"type": 3}), "finish_reason"),
        (answer_with_meta(output_token_logprobs=None), "output_token_logprobs"),
        (answer_with_meta(output_token_logprobs=[[-0.5]]), "output_token_logprobs"),
        (answer_with_meta(output_token_logprobs=[[None, 5, None]]), "output_token_logprobs"),
        (answer_with_meta(output_token_logprobs=[[-0.5, "5", None]]), "output_token_logprobs"),
        (answer_with_meta(output_token_logprobs=[[float("nan"), 5, None], [0.0, 6, None]]), "finite"),
        ({**ANSWER, "output_ids": [5, 9]}, "output_ids differ"),
    ],
)
def test_malformed_answer_raises_a_protocol_error_that_quotes_it(answer, complaint):
    with pytest.raises(EngineProtocolError, match=complaint) as caught:
        GenerateResult.from_json(answer, url="http://e:1")
    assert json.dumps(answer)[:20] in str(caught.value)
    assert "http://e:1" in str(caught.value)


def test_abort_before_the_first_token_gives_an_empty_result():
    answer = {"text": "", "meta_info": {"finish_reason": {"type": "abort"}, "completion_tokens": 0}}
    result = GenerateResult.from_json(answer, url="u")
    assert (result.token_ids, result.log_probs, result.finish_type) == ([], [], "abort")


def test_non_json_answer_is_quoted_in_the_error():
    with pytest.raises(EngineProtocolError, match="not JSON: <html>oops"):
        call(answering(text="<html>oops"), lambda client: client.generate({}))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": {"message": "top_p must be in (0, 1]"}}, "top_p must be in (0, 1]"),
        ({"error": "no"}, "no"),
        ({"message": "plain"}, "plain"),
        ({"detail": 3}, '{"detail": 3}'),
    ],
)
def test_rejection_carries_status_and_message(body, message):
    with pytest.raises(EngineRejected) as caught:
        call(answering(body, status=400), lambda client: client.generate({}))
    assert (caught.value.status, caught.value.message, caught.value.transient) == (400, message, False)


def test_server_error_raises_engine_failed():
    with pytest.raises(EngineFailed, match=r"/generate failed with status 500: out of memory") as caught:
        call(answering(text="out of memory", status=500), lambda client: client.generate({}))
    assert caught.value.transient


def test_update_with_success_false_raises_engine_rejected():
    server = answering({"success": False, "message": "shape mismatch"})
    with pytest.raises(EngineRejected, match="shape mismatch"):
        call(server, lambda client: client.update_weights_from_disk("/m", 3))


def test_timeout_error_names_engine_call_and_seconds():
    async def never(request):
        await asyncio.sleep(60)

    server = Server(never)
    with pytest.raises(EngineTimeout, match=r"/generate .* 0.1 s"):
        call(Server(never), lambda client: client.generate({}, timeout_s=0.1))
    with pytest.raises(EngineTimeout, match=r"/flush_cache did not finish within its deadline of 0.2 s") as caught:
        call(server, lambda client: client.flush_cache(timeout_s=0.2))
    assert server.url in str(caught.value)


def test_refused_connection_raises_unreachable_and_not_accepted():
    url = f"http://127.0.0.1:{free_port()}"

    async def main():
        async with EngineClient(url, connect_retries=1) as client:
            with pytest.raises(EngineUnreachable, match="could not connect") as caught:
                await client.generate({})
            assert not caught.value.accepted
            assert url in str(caught.value)
            with pytest.raises(EngineUnreachable):
                await client.health()

    asyncio.run(main())


def test_generate_retries_until_the_engine_listens():
    port, server = free_port(), answering()

    async def main():
        async with EngineClient(f"http://127.0.0.1:{port}", timeout_s=120) as client:
            waiting = asyncio.create_task(client.generate({}))
            await asyncio.sleep(0.15)
            async with server.listening(port):
                assert await waiting == ANSWER

    asyncio.run(main())


def test_request_is_not_resent_after_a_lost_connection():
    async def hang_up(request):
        request.transport.abort()
        await asyncio.sleep(60)

    server = Server(hang_up)
    with pytest.raises(EngineUnreachable, match="lost its connection") as caught:
        call(server, lambda client: client.generate({}))
    assert caught.value.accepted
    assert len(server.seen) == 1


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        (lambda c: c.abort("r1"), ("POST", "/abort_request", {"rid": "r1"})),
        (lambda c: c.abort(abort_all=True), ("POST", "/abort_request", {"abort_all": True})),
        (lambda c: c.pause("in_place"), ("POST", "/pause_generation", {"mode": "in_place"})),
        (lambda c: c.continue_(), ("POST", "/continue_generation", {})),
        (lambda c: c.flush_cache(), ("POST", "/flush_cache", {})),
        (lambda c: c.health(), ("GET", "/health", None)),
        (lambda c: c.health_generate(), ("GET", "/health_generate", None)),
        (lambda c: c.release_memory(), ("POST", "/release_memory_occupation", {})),
        (lambda c: c.resume_memory(["weights"]), ("POST", "/resume_memory_occupation", {"tags": ["weights"]})),
        (
            lambda c: c.update_weights_from_disk("/m", 3),
            ("POST", "/update_weights_from_disk", {"model_path": "/m", "weight_version": "3", "flush_cache": True}),
        ),
        (
            lambda c: c.load_lora_adapter("n", "/a", 3),
            (
                "POST",
                "/load_lora_adapter",
                {"lora_name": "n", "lora_path": "/a", "weight_version": "3", "flush_cache": True},
            ),
        ),
        (
            lambda c: c.update_weights_from_tensor_files(["/a", "/b"], 4, flush_cache=False),
            (
                "POST",
                "/update_weights_from_tensor",
                {
                    "load_format": "safetensors_file",
                    "paths": ["/a", "/b"],
                    "weight_version": "4",
                    "flush_cache": False,
                },
            ),
        ),
    ],
)
def test_control_calls_send_the_expected_requests(use, expected):
    server = answering({"success": True})
    call(server, use)
    assert server.seen == [expected]


def test_weight_version_and_health_answers_are_parsed():
    assert call(answering({"weight_version": 12}), lambda c: c.get_weight_version()) == "12"
    assert call(answering(text=""), lambda c: c.health()) is True
    assert call(answering(text="loading", status=503), lambda c: c.health()) is False
    with pytest.raises(EngineProtocolError, match="without weight_version"):
        call(answering({}), lambda c: c.get_weight_version())
    with pytest.raises(ValueError, match="either a rid or abort_all"):
        call(answering(), lambda c: c.abort())


def test_one_client_serves_several_event_loops():
    client = EngineClient("http://nowhere")

    async def main():
        server = answering({"weight_version": "1"})
        async with server.listening():
            client.base_url = server.url
            try:
                return await client.get_weight_version()
            finally:
                await client.aclose()

    assert [asyncio.run(main()), asyncio.run(main())] == ["1", "1"]


# -- sampling parameters --------------------------------------------------------------------------------------------


def test_sampling_params_come_from_the_flags():
    class Flags:
        rollout_temperature = 0.7
        rollout_top_p = 0.9
        rollout_top_k = 20
        rollout_max_response_len = 64
        rollout_stop = None
        rollout_stop_token_ids = (7,)
        rollout_skip_special_tokens = True

    assert rollout_sampling_params(Flags()) == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "max_new_tokens": 64,
        "stop": None,
        "stop_token_ids": (7,),
        "skip_special_tokens": True,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }


def test_seeds_depend_on_every_part_and_fit_31_bits():
    seeds = {sampling_seed(seed, kind, i) for seed in (1, 2) for kind in ("train", "eval") for i in range(500)}
    assert len(seeds) == 2000
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert sampling_seed(42, "train", 3) == sampling_seed(42, "train", 3)


# -- several engines ------------------------------------------------------------------------------------------------


@asynccontextmanager
async def pool_of(*servers, **options):
    async with AsyncExitStack() as stack:
        for server in servers:
            await stack.enter_async_context(server.listening())
        pool = EnginePool([server.url for server in servers], timeout_s=120, control_timeout_s=120, **options)
        try:
            yield pool
        finally:
            await pool.aclose()


def held_server():
    """A server whose answers wait for `release`."""
    release = asyncio.Event()

    async def handler(request):
        await release.wait()
        return web.json_response(ANSWER)

    return Server(handler), release


def test_key_keeps_its_engine_and_new_keys_go_to_the_least_loaded():
    async def main():
        (left, release_left), (right, release_right) = held_server(), held_server()
        async with pool_of(left, right) as pool:
            tasks = []
            for group in (0, 0, 0, 1, 2, 0, 1):
                tasks.append(asyncio.create_task(pool.generate({"group": group}, group)))
                await asyncio.sleep(0)
            release_left.set(), release_right.set()
            await asyncio.gather(*tasks)
        groups = [[body["group"] for _, _, body in server.seen] for server in (left, right)]
        # group 0 pins the first engine (3 in flight), groups 1 and 2 pin the second (idle, then 1 against 3)
        assert [sorted(g) for g in groups] == [[0, 0, 0, 0], [1, 1, 2]]

    asyncio.run(main())


def test_key_moves_away_from_an_overloaded_engine():
    async def main():
        (left, release_left), (right, release_right) = held_server(), held_server()
        async with pool_of(left, right, imbalance_limit=2) as pool:
            tasks = []
            for _ in range(5):
                tasks.append(asyncio.create_task(pool.generate({}, "one key")))
                await asyncio.sleep(0)
            release_left.set(), release_right.set()
            await asyncio.gather(*tasks)
        assert (len(left.seen), len(right.seen)) == (3, 2)

    asyncio.run(main())


def test_given_up_pool_tries_each_dead_engine_once():
    async def main():
        pool = EnginePool([f"http://127.0.0.1:{free_port()}" for _ in range(2)])
        pool.give_up("it died too often")
        for left in (1, 0):
            with pytest.raises(EngineUnreachable):
                await pool.generate_resumable({}, "key")
            assert len(pool.up) == left
        with pytest.raises(EngineProtocolError, match="was given up: it died too often"):
            await pool.generate_resumable({}, "key")
        await pool.aclose()

    asyncio.run(main())


@pytest.mark.parametrize("ask", ["generate", "sample"])
def test_requests_fail_over_from_an_unreachable_engine(ask, monkeypatch):
    monkeypatch.setattr("slime.engine.http.pool.FIRST_BACKOFF_S", 0.01)

    async def meta_info(pool):
        answer = await getattr(pool, ask)({}, "key")
        return answer["meta_info"] if ask == "generate" else answer.meta_info

    async def main():
        server = answering()
        async with server.listening():
            pool = EnginePool([f"http://127.0.0.1:{free_port()}", server.url])
            for client in pool.clients:
                client.connect_retries = 0
            assert await meta_info(pool) == ANSWER["meta_info"]
            assert await meta_info(pool) == ANSWER["meta_info"]
            await pool.aclose()
        pool = EnginePool([f"http://127.0.0.1:{free_port()}"])
        pool.clients[0].connect_retries = 0
        with pytest.raises(EngineUnreachable):
            await meta_info(pool)
        await pool.aclose()

    asyncio.run(main())


def test_broadcast_reaches_all_engines_and_raises_the_error_of_one():
    async def main():
        servers = [answering({"weight_version": str(i)}) for i in range(3)]
        async with pool_of(*servers) as pool:
            assert await pool.broadcast("get_weight_version") == ["0", "1", "2"]
        servers = [answering({}), answering({"error": {"message": "no"}}, status=400), answering({})]
        async with pool_of(*servers) as pool:
            with pytest.raises(EngineRejected, match=servers[1].url):
                await pool.broadcast("continue_")
        assert [len(server.seen) for server in servers] == [1, 1, 1]

    asyncio.run(main())


# -- the router -----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def router_over(*servers):
    async with pool_of(*servers) as pool:
        router = Router(pool)
        host, port = await router.start()
        try:
            async with aiohttp.ClientSession(f"http://{host}:{port}") as session:
                yield session, pool
        finally:
            await router.aclose()


def test_router_forwards_by_routing_key():
    async def main():
        left, right = answering(), answering({"id": "chat"}, status=429)
        async with router_over(left, right) as (session, pool):
            for _ in range(3):
                async with session.post(
                    "/generate", json={"input_ids": [1]}, headers={"X-SMG-Routing-Key": "s"}
                ) as got:
                    assert await got.json() == ANSWER
            pool._members[0].in_flight = 1
            async with session.post("/v1/chat/completions?a=b", json={"m": 1}) as got:
                assert (got.status, await got.json()) == (429, {"id": "chat"})
            async with session.get("/workers") as got:
                assert [worker["url"] for worker in (await got.json())["workers"]] == pool.urls
            async with session.get("/health") as got:
                assert got.status == 200
        assert [path for _, path, _ in left.seen] == ["/generate"] * 3 + ["/health"]
        assert [path for _, path, _ in right.seen] == ["/v1/chat/completions", "/health"]

    asyncio.run(main())


@pytest.mark.parametrize(
    "target",
    [
        "/v1/../pause_generation",
        "/v1/%2e%2e/flush_cache",
        "/v1/.%2E/flush_cache?a=b",
        "/v1/models/../../flush_cache",
        "/v1/..%2fflush_cache",
        "/v1/%252e%252e/flush_cache",
        "/v1/./../flush_cache",
        "/v1//../../flush_cache",
        "http://localhost/v1/../flush_cache",
    ],
)
def test_router_rejects_paths_that_escape_v1(target):
    """HTTP clients such as aiohttp resolve dot segments before sending, so the request is written by hand."""

    async def main():
        engine = answering()
        async with router_over(engine) as (session, _):
            for wanted, forwarded in ((target, False), ("/v1/models/Qwen2.5..x?a=%2e%2e", True)):
                url = session._base_url
                reader, writer = await asyncio.open_connection(url.host, url.port)
                writer.write(f"POST {wanted} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
                status = int((await reader.read()).split()[1])
                writer.close()
                assert (status, bool(engine.seen)) == ((200, True) if forwarded else (404, False))
        assert [path for _, path, _ in engine.seen] == ["/v1/models/Qwen2.5..x"]

    asyncio.run(main())


def test_router_drops_idle_connections_but_none_in_use(monkeypatch):
    monkeypatch.setattr("slime.engine.http.router.MOST_CONNECTIONS", 16)

    async def main():
        come, go_on = asyncio.Event(), asyncio.Event()

        async def slow(request):
            come.set()
            await go_on.wait()
            return web.json_response(ANSWER)

        async with router_over(Server(slow)) as (session, _), asyncio.timeout(120):
            url = session._base_url
            served = asyncio.ensure_future(session.post("/generate", json={}))
            await come.wait()
            strangers = [await asyncio.open_connection(url.host, url.port) for _ in range(40)]
            async with session.get("/workers") as got:
                assert got.status == 200
            for reader, _ in strangers[:20]:
                assert await reader.read() == b""
            go_on.set()
            async with await served as got:
                assert await got.json() == ANSWER
            for _, writer in strangers:
                writer.close()

    asyncio.run(main())


def test_router_forwards_streams_chunk_by_chunk():
    async def main():
        go_on = asyncio.Event()

        async def stream(request):
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await response.write(b"data: 1\n\n")
            await go_on.wait()
            await response.write(b"data: [DONE]\n\n")
            return response

        async with (
            router_over(Server(stream)) as (session, _),
            session.post("/generate", json={"stream": True}) as got,
        ):
            assert got.headers["Content-Type"] == "text/event-stream"
            assert await got.content.readuntil(b"\n\n") == b"data: 1\n\n"
            go_on.set()
            assert await got.content.read() == b"data: [DONE]\n\n"

    asyncio.run(main())


def test_router_names_the_unreachable_engine():
    async def main():
        url = f"http://127.0.0.1:{free_port()}"
        pool = EnginePool([url])
        router = Router(pool)
        host, port = await router.start()
        async with aiohttp.ClientSession(f"http://{host}:{port}") as session:
            async with session.post("/generate", json={}) as got:
                assert got.status == 502
                assert url in (await got.json())["error"]["message"]
            async with session.get("/health") as got:
                assert got.status == 503
        await router.aclose()
        await pool.aclose()

    asyncio.run(main())


def test_router_breaks_off_when_the_engine_dies_mid_response():
    async def main():
        async def half(request):
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(b"half")
            request.transport.abort()
            return response

        async with router_over(Server(half)) as (session, _):
            with pytest.raises(aiohttp.ClientError):
                async with session.post("/generate", json={}) as got:
                    await got.read()

    asyncio.run(main())


def test_router_requests_to_an_engine_set_down_end_or_move():
    """The engine hangs: a started stream breaks off, a request without an answer moves to another engine."""

    async def main():
        hung, came = asyncio.Event(), asyncio.Semaphore(0)

        async def hang(request):
            if (await request.json()).get("stream"):
                response = web.StreamResponse()
                await response.prepare(request)
                await response.write(b"half")
            came.release()
            await hung.wait()
            return web.Response()

        async with router_over(Server(hang), answering()) as (session, pool), asyncio.timeout(120):

            async def ask(**body):
                async with session.post("/generate", json=body) as got:
                    return await got.read()

            pool.set_down(pool.urls[1])
            asking = [asyncio.ensure_future(ask(stream=True)), asyncio.ensure_future(ask())]
            for _ in asking:
                await came.acquire()
            pool.set_up(pool.urls[1])
            pool.set_down(pool.urls[0])
            broken, moved = await asyncio.gather(*asking, return_exceptions=True)
            assert isinstance(broken, aiohttp.ClientError)
            assert json.loads(moved) == ANSWER
            pool.set_down(pool.urls[1])
            waiting = asyncio.ensure_future(ask())
            await asyncio.sleep(0)
            pool.set_up(pool.urls[1])
            assert json.loads(await waiting) == ANSWER
            pool.set_down(pool.urls[1])
            pool.give_up("enough")
            async with session.post("/generate", json={}) as got:
                assert (got.status, "was given up: enough" in await got.text()) == (502, True)
            hung.set()

    asyncio.run(main())
