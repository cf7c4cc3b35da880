"""Publishes weights through a process group: rank 0 of the trainers broadcasts, every engine receives (NCCL or gloo).

Invariant: the group is created once, and again after a failure. The shapes that the trainer will send are compared with
those of embedded engines before the first tensor is sent. An engine that got only some of the buckets does not generate
until it gets whole weights: the embedded engine rejects requests, and SGLang keeps reporting the old version, which
fails the run.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence

from slime.cluster.ports import free_port, is_loopback, own_address
from slime.cluster.watchdog import named
from slime.engine.http.client import EngineClient, EngineFailed, call_all
from slime.errors import RunFailed
from slime.storage.json_types import JsonObject
from slime.weights.publisher import (
    Buckets,
    EngineKind,
    PublisherSettings,
    StagedPublisher,
    StagedVersion,
    total_bytes,
)

_JOIN_TIMEOUT_S = 120.0

logger = logging.getLogger(__name__)

ChooseStoreAddress = Callable[[Sequence[str]], tuple[str, int]]
"""Returns the address and port at which the trainers' rank 0 serves the store, for the engines at these URLs."""


def local_store_address(urls: Sequence[str]) -> tuple[str, int]:
    """Return an address of this machine that every engine reaches (loopback if all are local), and a free port."""
    seen = list(dict.fromkeys(own_address(url) for url in urls))
    beyond = [address for address in seen if not is_loopback(address)]
    if len(beyond) > 1:
        logger.warning("engines reach this machine as %s: all of them get %s", ", ".join(beyond), beyond[0])
    address = (beyond or seen)[0]
    return address, free_port(address)


class BroadcastPublisher(StagedPublisher):
    """Broadcasts whole weights, or A and B of an adapter, to all engines with `backend` nccl or gloo.

    `processes_per_engine` is the number of ranks of one engine. Without `meet` the trainers' rank 0 is on this machine.
    """

    def __init__(
        self,
        settings: PublisherSettings,
        *,
        backend: str,
        engine_kind: EngineKind,
        with_adapter: bool = False,
        processes_per_engine: int = 1,
        meet: ChooseStoreAddress | None = None,
    ) -> None:
        super().__init__(settings)
        self._backend = backend
        self._kind = engine_kind
        self._with_adapter = with_adapter
        self._processes_per_engine = processes_per_engine
        self._meet = meet or local_store_address
        self._group: str | None = None
        self._buckets: Buckets = ()
        self._adapter: JsonObject | None = None

    def _stage(self, version: int, *, whole: bool) -> StagedVersion:
        if self._group is None:
            if self._with_adapter:
                self._adapter, self._buckets = self._source.call("adapter_buckets")[0]
            else:
                self._buckets = self._source.call("weight_buckets")[0]
            if self._kind == "embedded" and not self._with_adapter:
                self._settings.run_async(named(self._compare_shapes(), f"shape check of weight update {version}"))
            self._group = self._settings.run_async(named(self._connect(), "weight update group"))
        return StagedVersion(total_bytes(self._buckets))

    async def _compare_shapes(self) -> None:
        """Compare the shapes of the engines with the announced ones.

        An adapter changes no weight before its last bucket, at which the engine checks it.
        """
        for client in self._clients:
            has = (await client.check_weights("shapes", timeout_s=self._settings.timeout_s))["shapes"]
            for tensor in (tensor for bucket in self._buckets for tensor in bucket):
                if has.get(tensor["name"]) != tensor["shape"]:
                    raise RunFailed(
                        f"the trainers have {tensor['name']} with shape {tensor['shape']} and engine {client.base_url} "
                        f"has {has.get(tensor['name'], 'no such tensor')}: nothing was sent"
                    )

    async def _connect(self) -> str:
        """Create a group with all engines, and return its name."""
        name = f"slime-{secrets.token_hex(16)}"  # random: the group is found in its store only by this name
        address, port = await asyncio.to_thread(self._meet, [client.base_url for client in self._clients])
        world_size = 1 + len(self._clients) * self._processes_per_engine
        joining = asyncio.to_thread(
            self._source.call,
            "join_engines",
            address=address,
            port=port,
            world_size=world_size,
            name=name,
            backend=self._backend,
            timeout_s=_JOIN_TIMEOUT_S,
        )
        answers = [
            client.init_weights_update_group(
                master_address=address,
                master_port=port,
                rank_offset=1 + index * self._processes_per_engine,
                world_size=world_size,
                group_name=name,
                backend=self._backend,
                timeout_s=_JOIN_TIMEOUT_S + 10,
            )
            for index, client in enumerate(self._clients)
        ]
        results = await asyncio.gather(joining, *answers, return_exceptions=True)
        _raise_first(results[::-1])  # an engine's error is more specific than the trainer's timeout
        logger.info("%d engines joined group %s (%s) at %s:%d", len(self._clients), name, self._backend, address, port)
        return name

    async def _transfer(
        self, clients: Sequence[EngineClient], staged: StagedVersion, version: int
    ) -> Sequence[EngineClient]:
        async def announce(client: EngineClient) -> None:
            """Announce all buckets to one engine, each after it has the previous one."""
            assert self._group is not None
            for number, bucket in enumerate(self._buckets, start=1):
                await client.update_weights_from_distributed(
                    bucket,
                    version,
                    group_name=self._group,
                    flush_cache=self._settings.flush_cache and number == len(self._buckets),
                    bucket=(number, len(self._buckets)) if self._kind == "embedded" else None,
                    adapter=self._adapter,
                    timeout_s=self._settings.timeout_s,
                )

        async def announce_all() -> None:
            try:
                await call_all(clients, announce)
            except BaseException:
                await self._disband()  # or the trainer would wait for an engine that does not receive
                raise

        verb = "broadcast_adapter" if self._with_adapter else "broadcast_weights"
        sending = asyncio.to_thread(self._source.call, verb, version=version)
        results = await asyncio.gather(announce_all(), sending, return_exceptions=True)
        if any(isinstance(result, BaseException) for result in results):
            await self._disband()
        announced, sent = results
        # an engine that timed out has no cause of its own: the trainer's error comes first
        _raise_first((sent, announced) if isinstance(announced, EngineFailed) else (announced, sent))
        return ()

    async def _disband(self) -> None:
        """Make the reachable engines leave the group; the next update creates a new one."""
        name, self._group = self._group, None
        if name is not None:
            leaving = (client.destroy_weights_update_group(name, timeout_s=10) for client in self._clients)
            await asyncio.gather(*leaving, return_exceptions=True)

    def bring(self, clients: Sequence[EngineClient], version: int, *, base: int | None = None) -> bool:
        """Return False: a new engine is not in the group, and waits for the next update, which creates a new group."""
        self.engines_changed()
        return False

    def engines_changed(self) -> None:
        self._settings.run_async(named(self._disband(), "end of the weight update group"))

    def _retire(self, staged: StagedVersion, version: int, *, arrived: bool) -> None:
        pass

    def close(self) -> None:
        """Leave the group; the trainer's side ends with its process."""
        self.engines_changed()


def _raise_first(results: Sequence[object]) -> None:
    for result in results:
        if isinstance(result, BaseException):
            raise result
