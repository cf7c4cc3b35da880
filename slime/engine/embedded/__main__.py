"""`python -m slime.engine.embedded` and `slime serve`: bind, load the model, serve until a signal arrives."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

from aiohttp import web

from slime.cluster.child_env import (
    CONTROL_KEY_VARIABLE,
    ENGINE_KEY_VARIABLE,
    delete_engine_key,
    store_engine_key,
)
from slime.cluster.http_server import BACKLOG, ClientLogLimit, Connections, most_connections
from slime.cluster.ports import is_loopback
from slime.cluster.watchdog import ending_signals
from slime.config.model_folder import check_model_folder
from slime.engine.embedded.engine import EngineCore
from slime.engine.embedded.http.async_engine import EngineBridge, run_in_daemon_thread
from slime.engine.embedded.http.requests import ModelFacts
from slime.engine.embedded.http.server import EngineServer
from slime.engine.embedded.loader import parse_token_ids
from slime.engine.embedded.options import EngineOptions, parse_options
from slime.engine.embedded.tokenizer import ChatTokenizer, EngineTokenizer, NoTokenizer, plain_tokenizer
from slime.errors import UserError

log = logging.getLogger("slime.engine.embedded")

NATIVE_THREADS = {"load", "compile", "kernels"}
OTHER_CONNECTIONS = 4096  # beyond one for each admitted sample: they get status 429, or are idle
SWITCH_INTERVAL_S = 0.0002  # interpreter switch interval: less than a step


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(argv)
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(ClientLogLimit())
    logging.basicConfig(
        level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", handlers=[handler]
    )
    try:
        check_model_folder(str(options.model_path), "--model-path")
        return asyncio.run(serve(options))
    except UserError as mistake:
        print(f"error: {mistake}", file=sys.stderr, flush=True)
        return 2


def with_environment_keys(options: EngineOptions) -> EngineOptions:
    """Fill missing keys from the environment, and remove them there: child processes need not know them.

    Without an API key, an engine that listens beyond loopback gets a random one for all routes, which is printed.
    """
    everywhere, control = (os.environ.pop(name, None) or None for name in (ENGINE_KEY_VARIABLE, CONTROL_KEY_VARIABLE))
    everywhere, control = options.api_key or everywhere, options.admin_api_key or control
    if everywhere is None and not is_loopback(options.host):
        everywhere = secrets.token_urlsafe(24)
        header = f"Authorization: Bearer {everywhere}"
        print(
            f"--host {options.host}: other machines can reach this engine, so it requires the key {everywhere} "
            f"({header}); see --api-key",
            flush=True,
        )
    return replace(options, api_key=everywhere, admin_api_key=control)


@contextmanager
def control_key(options: EngineOptions, port: int) -> Iterator[EngineOptions]:
    """Give an engine without keys one for its control routes; other programs of this user read it from a file, which
    exists while the engine runs."""
    if options.api_key is not None or options.admin_api_key is not None:
        yield options
        return
    key = secrets.token_urlsafe(32)
    log.info("control routes require the key in %s", store_engine_key(port, key))
    try:
        yield replace(options, admin_api_key=key)
    finally:
        delete_engine_key(port, key)


def bind(host: str, port: int) -> socket.socket:
    """Return the listening socket; it is bound before the model is loaded so that a busy port is reported at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as cause:
        sock.close()
        raise UserError(
            f"cannot listen on {host}:{port} ({cause.strerror or cause}): stop the other process or choose another port"
        ) from cause
    sock.listen(BACKLOG)
    return sock


async def listen(app: web.Application, sock: socket.socket, connections: Connections) -> web.AppRunner:
    """Serve requests on `sock` until both the connections and the runner are closed."""
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=2.0)
    await runner.setup()
    assert runner.server is not None
    connections.accept_on(sock, runner.server)
    return runner


async def serve(options: EngineOptions) -> int:
    """Load the model and serve it; returns the exit code: 1 when the engine's thread died."""
    options = with_environment_keys(options)
    sock = bind(options.host, options.port)
    with control_key(options, sock.getsockname()[1]) as options:
        loop = asyncio.get_running_loop()
        stop: asyncio.Future[BaseException | None] = loop.create_future()

        def end(cause: BaseException | None) -> None:
            if not stop.done():
                stop.set_result(cause)

        for number in ending_signals():
            loop.add_signal_handler(number, end, None)
        core = EngineCore(options, on_death=lambda error: loop.call_soon_threadsafe(end, error))
        phases = {"imports": process_age()}
        engine = EngineBridge(core)
        most = most_connections(options.max_queued_requests + OTHER_CONNECTIONS, descriptors_each=1)
        connections = Connections(most)
        runner = await listen(EngineServer(engine, connections).app, sock, connections)
        address = f"http://{options.host}:{sock.getsockname()[1]}"
        log.info("listening on %s, loading %s", address, options.model_path)
        try:
            loading = run_in_daemon_thread(lambda: load(core))
            awaited: list[asyncio.Future[Any]] = [loading, stop]
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                return 0
            engine.facts = loading.result()
            if core.runner.cuda:
                shorten_switch_interval()
            gc.freeze()  # loaded objects stay: collecting among them would delay requests and steps
            core.start()
            loaded = core.loaded
            took = ", ".join(f"{name} {each:.1f}" for name, each in (phases | loaded.phases).items() if each >= 0.05)
            log.info("started in %.1f s (%s)", process_age(), took)
            log.info("ready on %s: %s tokens of KV cache, %s of context", address, loaded.capacity, loaded.context_len)
            return 0 if await stop is None else 1
        finally:
            gc.unfreeze()
            if engine.facts is not None:
                core.stop()
            await connections.aclose()
            await runner.cleanup()


def shorten_switch_interval() -> None:
    """Shorten the interpreter's switch interval: by default a thread that computes in Python keeps the GIL for 5 ms.

    Launching a step takes the GIL a dozen times, and waits for it each time while requests are parsed or kernels are
    compiled.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def process_age() -> float:
    """Return the seconds since this process started; 0 where they are unknown."""
    try:
        with open("/proc/self/stat") as stream:
            began = int(stream.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - began
    except (OSError, AttributeError):
        return 0.0


def load(core: EngineCore) -> ModelFacts:
    """Load tokenizer and model; any problem with the folder is a `UserError`."""
    from slime.cluster.devices import resolve_device

    options = core.options
    chat = ChatTokenizer(options.model_path, trust_remote_code=options.trust_remote_code)
    tokenizer: EngineTokenizer = NoTokenizer()
    if not options.skip_tokenizer_init:
        try:
            tokenizer = plain_tokenizer(options.model_path) or chat.get()
        except UserError as mistake:
            raise UserError(f"{mistake}; --skip-tokenizer-init serves token ids alone") from mistake
    core.load(resolve_device(options.device))
    loaded = core.loaded
    stops = loaded.model.eos_ids | parse_token_ids(tokenizer.eos_token_id)
    has_experts = loaded.runner.experts.topk > 0
    for_chats = None if options.skip_tokenizer_init else chat.get
    return ModelFacts(tokenizer, loaded.vocab_size, loaded.context_len, stops, has_experts, chat_tokenizer=for_chats)


def end_process(code: int) -> NoReturn:
    """Exit; at once while threads load or compile, since a normal exit would abort in the middle of native code."""
    if any(thread.name in NATIVE_THREADS for thread in threading.enumerate()):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    faulthandler.register(signal.SIGQUIT, all_threads=True, chain=False)  # stacks go to the log
    try:
        code = main()
    except Exception:  # noqa: BLE001 - an unexpected error is printed and ends the process, as without this handler
        traceback.print_exc()
        code = 1
    end_process(code)
