"""`slime serve` for several engines: runs a fleet and its router until it is stopped.

It takes the engine flags of `train`. Its last line of output is the flag with which a run attaches to the engines. On
loopback the engines' key is stored in files of this user, where that run finds it.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from urllib.parse import urlsplit

from slime.cluster.child_env import delete_engine_key, store_engine_key
from slime.cluster.devices import choose_dtype, resolve_device, slow_dtype_note
from slime.cluster.ports import is_loopback
from slime.cluster.watchdog import ending_signals
from slime.config.parser import parse_flags
from slime.engine.fleet.backend import choose_backend
from slime.engine.fleet.engines import Engines, check_engines
from slime.engine.http.blocking import KEY_VARIABLE
from slime.engine.http.pool import EnginePool
from slime.engine.http.router import Router
from slime.engine.launch import engine_url
from slime.errors import UserError
from slime.models.folder import read_config_json
from slime.models.shape import count_parameters

FLEET_FLAGS = ("--rollout-backend", "--rollout-num-gpus", "--sglang-config", "--prefill-num-servers")
"""Each of these flags selects a fleet; without any of them `slime serve` starts a single embedded engine."""
_CHECK_S = 1.0


def wants_fleet(words: Sequence[str]) -> bool:
    """Return true if this command line selects a fleet."""
    return any(word.partition("=")[0] in FLEET_FLAGS for word in words)


def serve_fleet(words: Sequence[str]) -> int:
    """Start the engines, print their addresses, and wait for Ctrl-C, SIGTERM or the end of an engine."""
    config = parse_flags(words)
    if config.hf_checkpoint is None:
        raise UserError("--hf-checkpoint is missing: give it the Hugging Face model folder to serve")
    if config.rollout_external_engine_addrs:
        raise UserError("--rollout-external-engine-addrs names engines that run already: slime serve starts its own")
    gpus, each = config.rollout_num_gpus or config.rollout_num_gpus_per_engine, config.rollout_num_gpus_per_engine
    if gpus % each:
        raise UserError(f"--rollout-num-gpus {gpus} is not a multiple of --rollout-num-gpus-per-engine {each}")
    config = config.replace(rollout_num_gpus=gpus, colocate=True)
    device = resolve_device(config.device)
    backend, reason = choose_backend(config, device)
    check_engines(config, backend, device)
    read_config_json(config.hf_checkpoint)
    run_dir = Path(config.output_dir or tempfile.mkdtemp(prefix="slime-serve-"))
    print(f"{backend} engines ({reason}), logs in {run_dir / 'logs'}", flush=True)
    flag, given = (
        ("--dtype", config.dtype) if config.rollout_dtype == "auto" else ("--rollout-dtype", config.rollout_dtype)
    )
    dtype, why = choose_dtype(given, device, count_parameters(config.hf_checkpoint))
    print(f"precision {dtype} ({why})", flush=True)
    note = slow_dtype_note(flag, given, device)
    if note is not None:
        print(f"note: {note}", flush=True)
    engines = Engines(config, device=device, run_dir=run_dir)
    try:
        asyncio.run(_serve(engines, config.host))
    finally:
        engines.stop()
    return 0


async def _serve(engines: Engines, host: str) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in ending_signals():
        loop.add_signal_handler(number, stop.set)
    starting = asyncio.ensure_future(asyncio.to_thread(engines.start))
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        engines.stop()
        await asyncio.gather(starting, return_exceptions=True)
        return
    await starting
    own_router_url = engines.router_url
    pool = EnginePool(engines.urls if own_router_url is None else [own_router_url], api_key=engines.key)
    router = Router(pool, key=None if is_loopback(host) else engines.key)
    served = [*engines.urls, *chain.from_iterable(engines.model_urls.values())]
    ports = {urlsplit(one).port or 0 for one in served} if is_loopback(host) else set()
    try:
        for port in ports:
            store_engine_key(port, engines.key)
        router_url = engine_url(*await router.start(host))
        for index, url in enumerate(engines.urls):
            print(f"engine-{index}  {url}", flush=True)
        for name, urls in list(engines.model_urls.items())[1:]:
            print(f"{name}  {' '.join(urls)}", flush=True)
        print(f"router    {router_url}", flush=True)
        needs_key = not all(is_loopback(urlsplit(url).hostname or "") for url in engines.urls)
        if not os.environ.get(KEY_VARIABLE) and needs_key:
            print(
                f"other machines can reach these engines, so they need a key: {KEY_VARIABLE}={engines.key}", flush=True
            )
        addresses = " ".join(url.removeprefix("http://") for url in engines.urls)
        print(f"attach a run with: --rollout-external-engine-addrs {addresses}", flush=True)
        while not stop.is_set():
            engines.check()
            await asyncio.wait((stopping,), timeout=_CHECK_S)
    finally:
        stopping.cancel()
        for port in ports:
            delete_engine_key(port, engines.key)
        await router.aclose()
        await pool.aclose()
