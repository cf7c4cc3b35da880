"""The event-loop thread, the registry of runtimes, and the helpers under upstream's import paths."""

import asyncio
import base64
import socket
import threading

import pytest
from aiohttp import web

from slime.engine.http.errors import EngineRejected, EngineTimeout, EngineUnreachable
from slime.rollout.event_loop import LoopThread
from slime.rollout.runtime import newest_runtime, runtime_for
from slime.utils import http_utils
from slime.utils.async_utils import AsyncLoopThread, get_async_loop, run
from slime.utils.http_utils import get, get_model_url, get_rollout_num_engines, post
from slime.utils.misc import SingletonMeta, load_function


async def value(x):
    return x


def test_loop_thread_runs_coroutines_and_cancels_tasks_on_close():
    loop_thread = LoopThread("test-loop")
    assert loop_thread.run(value(3), 60) == 3
    with pytest.raises(TimeoutError, match=r"did not finish within 0\.05 s"):
        loop_thread.run(asyncio.sleep(60), 0.05)

    async def inner():
        loop_thread.run(value(1))

    with pytest.raises(RuntimeError, match="would wait forever"):
        loop_thread.run(inner(), 60)

    cancelled = threading.Event()

    async def forever():
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    asyncio.run_coroutine_threadsafe(forever(), loop_thread.loop)
    loop_thread.run(asyncio.sleep(0))
    loop_thread.close()
    loop_thread.close()
    assert cancelled.is_set()
    assert "test-loop" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(RuntimeError, match="closed"):
        loop_thread.run(value(1))


def test_closed_runtime_is_unregistered_and_its_loop_closed(engine, make_runtime):
    runtime = make_runtime([engine.url])
    assert runtime_for(runtime.args) is runtime_for(runtime.config) is newest_runtime() is runtime
    runtime.close()
    runtime.close()
    assert newest_runtime() is None
    with pytest.raises(LookupError):
        runtime_for(runtime.args)
    assert runtime.loop_thread.loop.is_closed()


def test_close_abandons_a_resource_that_times_out(engine, make_runtime, monkeypatch, caplog):
    monkeypatch.setattr("slime.rollout.runtime.CLOSE_TIMEOUT_S", 0.05)
    runtime = make_runtime([engine.url])
    closed = []

    async def close(name):
        await asyncio.sleep(60 if name == "stuck" else 0)
        closed.append(name)

    for name in ("quick", "stuck"):  # closed in reverse order
        runtime.owned(name, lambda name=name: name, close)
    runtime.close()
    assert closed == ["quick"]
    assert "stuck: not closed after 0.05 s" in caplog.text
    assert runtime.loop_thread.loop.is_closed()


def test_cancelled_tasks_can_look_up_the_runtime_while_it_closes(engine, make_runtime):
    runtime = make_runtime([engine.url])
    found = []

    async def sample():
        try:
            await asyncio.sleep(60)
        finally:
            found.append(runtime_for(runtime.args))

    asyncio.run_coroutine_threadsafe(sample(), runtime.loop_thread.loop)
    runtime.run(asyncio.sleep(0))
    runtime.close()
    assert found == [runtime]
    assert newest_runtime() is None


def test_off_loop_calls_run_one_at_a_time(engine, make_runtime):
    runtime = make_runtime([engine.url])
    second_called = threading.Event()

    async def both():
        return await asyncio.gather(
            runtime.off_loop(second_called.wait, "the data source", 0.2),
            runtime.off_loop(second_called.set, "a filter"),
        )

    assert runtime.run(both()) == [False, None]


def test_run_uses_the_loop_of_the_runtime_if_one_exists(engine, make_runtime):
    async def loop():
        return asyncio.get_running_loop()

    assert run(value(2)) == 2
    assert run(loop()) is run(loop()) is get_async_loop().loop  # connections are reused across calls
    runtime = make_runtime([engine.url])
    assert run(loop()) is get_async_loop().loop is runtime.loop_thread.loop
    own = AsyncLoopThread()
    assert own.run(loop()) is own.loop
    own.close()


def test_state_has_no_processor_for_text_models_and_balances_dp_ranks(engine, make_runtime):
    state = make_runtime([engine.url], carried={"sglang_dp_size": 2}, n_samples_per_prompt=3).state
    assert state.processor is None
    assert state.group_sampling_seeds == [42, 43, 44]
    with state.dp_rank_context() as first, state.dp_rank_context() as second:
        assert (first, second) == (0, 1)
    with state.dp_rank_context() as again:
        assert again == 0


def with_server(handler, use):
    async def main():
        app = web.Application()
        app.router.add_route("*", "/x", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            return await use(f"http://127.0.0.1:{runner.addresses[0][1]}/x")
        finally:
            await runner.cleanup()

    return asyncio.run(main())


def test_post_retries_only_transient_errors(monkeypatch):
    monkeypatch.setattr(http_utils, "RETRY_PAUSE_S", 0.01)
    statuses = [500, 429, 200]

    async def flaky(request):
        body = await request.json()
        return web.json_response({"got": body, "key": request.headers.get("K")}, status=statuses.pop(0))

    assert with_server(flaky, lambda url: post(url, {"a": 1}, headers={"K": "v"})) == {"got": {"a": 1}, "key": "v"}
    calls = []

    async def refuse(request):
        calls.append(1)
        return web.Response(status=400, text="bad")

    with pytest.raises(EngineRejected, match="status 400: bad"):
        with_server(refuse, lambda url: post(url, {}))
    assert calls == [1]

    async def slow(request):
        await asyncio.sleep(60)

    with pytest.raises(EngineTimeout, match=r"0\.1 s"):
        with_server(slow, lambda url: post(url, {}, timeout_s=0.1))
    with pytest.raises(EngineUnreachable):
        asyncio.run(post("http://127.0.0.1:9/x", {}, max_retries=2))


def test_get_returns_text_for_a_non_json_body():
    async def plain(request):
        return web.Response(text="hello")

    assert with_server(plain, get) == "hello"


def test_model_urls_and_engine_count_come_from_args(engine, make_runtime):
    args = make_runtime([engine.url], rollout_num_gpus=4, rollout_num_gpus_per_engine=2).args
    assert get_rollout_num_engines(args) == 2
    assert get_model_url(args, "any") == f"{engine.url}/generate"
    named = args.replace(carried={**args.carried, "sglang_model_routers": {"judge": ("h", 1)}})
    assert get_model_url(named, "judge", "/v1/models") == "http://h:1/v1/models"


def test_load_function_and_singleton_meta(write_plugin):
    assert load_function(write_plugin("def f(args):\n    return args + 1\n"))(1) == 2

    class One(metaclass=SingletonMeta):
        def __init__(self, x):
            self.x = x

    class Child(One):
        pass

    assert One(1) is One(2)
    assert Child(3).x == 3
    One.clear_instances()
    assert One(4).x == 4


def test_images_become_data_urls():
    from PIL import Image  # a dependency of matplotlib

    from slime.utils.processing_utils import encode_image_for_rollout_engine

    url = encode_image_for_rollout_engine(Image.new("L", (2, 2)))
    assert base64.b64decode(url.removeprefix("data:image/png;base64,")).startswith(b"\x89PNG")


def test_misc_and_http_utility_functions(monkeypatch):
    from slime.utils.misc import exec_command, get_current_node_ip, get_free_port, group_by, should_run_periodic_action

    assert [i for i in range(10) if should_run_periodic_action(i, 4, 6, 9)] == [3, 5, 7, 8]
    assert not should_run_periodic_action(3, None, 4, 4)
    assert group_by([1, 2, 3], key=lambda n: n % 2) == {1: [1, 3], 0: [2]}
    assert exec_command("echo $((2 + 3))", capture_output=True) == "5\n"
    assert http_utils.is_port_available(get_free_port(20000, 2))
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        assert not http_utils.is_port_available(taken)
        assert http_utils.find_available_port(taken) > taken
    monkeypatch.setenv("SLIME_HOST_IP", "10.1.2.3")
    assert (http_utils.get_host_info()[1], get_current_node_ip()) == ("10.1.2.3", "10.1.2.3")
