"""Limits of a server: number of connections, and number of open files."""

from __future__ import annotations

import asyncio
import resource
import socket
from typing import Any

import pytest
from aiohttp import web

from slime.cluster.http_server import Connections, bind_sockets, most_connections


def test_open_file_limit_is_raised_and_never_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [1024, 4096]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.__setitem__(slice(None), new))
    assert (most_connections(100, descriptors_each=2), limits) == (100, [1024, 4096])
    assert (most_connections(1000, descriptors_each=2), limits) == (1000, [2256, 4096])
    assert (most_connections(10_000, descriptors_each=1), limits) == (3840, [4096, 4096])
    limits[:] = [resource.RLIM_INFINITY, resource.RLIM_INFINITY]
    assert most_connections(10_000, descriptors_each=2) == 10_000
    assert limits == [resource.RLIM_INFINITY, resource.RLIM_INFINITY]


def test_connections_fit_the_current_limit_if_raising_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert most_connections(10_000, descriptors_each=2) == 384


def test_connections_beyond_the_limit_close_the_oldest() -> None:
    """All connections are idle: each one beyond the limit closes the oldest one."""

    async def scenario() -> tuple[int, int]:
        connections = Connections(8)
        runner = web.AppRunner(web.Application(middlewares=[connections.served]))
        await runner.setup()
        [listening] = await bind_sockets("127.0.0.1", 0)
        storm = [socket.create_connection(listening.getsockname(), timeout=60) for _ in range(100)]
        assert runner.server is not None
        connections.accept_on(listening, runner.server)
        for one in storm[:92]:
            reader, writer = await asyncio.open_connection(sock=one)
            assert await reader.read() == b""
            writer.close()
        left = len([one for one in runner.server.connections if one.transport is not None])
        await connections.aclose()
        await runner.cleanup()
        for one in storm[92:]:
            one.close()
        return left, connections.refused

    assert asyncio.run(scenario()) == (8, 0)
