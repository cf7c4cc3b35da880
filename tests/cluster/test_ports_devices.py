from __future__ import annotations

import socket

import pytest
import torch

from slime.cluster.devices import resolve_device, threads_per_process
from slime.cluster.ports import free_port, free_ports, host_address, interface_with, require_free_port, sockets_at
from slime.errors import UserError


def test_free_ports_are_different_and_can_be_bound() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    for port in ports:
        socket.create_server(("127.0.0.1", port)).close()  # sets SO_REUSEADDR, as servers do: TIME_WAIT is allowed


def test_require_free_port_rejects_a_port_in_use() -> None:
    port = free_port()
    assert require_free_port(port, flag="--port") == port
    in_use = pytest.raises(UserError, match=f"port {port} .* is in use.* --port")
    with socket.create_server(("127.0.0.1", port)), in_use:
        require_free_port(port, flag="--port")


def test_port_just_used_counts_as_free() -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)) as server, socket.create_connection(("127.0.0.1", port)):
        server.accept()[0].close()
    assert require_free_port(port, flag="--port") == port


def test_unknown_host_is_a_user_error() -> None:
    with pytest.raises(UserError, match=r"--host no-such-host\.invalid"):
        free_port("no-such-host.invalid")


def test_resolve_device_selects_cpu_or_cuda() -> None:
    assert resolve_device("cpu") == "cpu"
    with pytest.raises(UserError, match="unknown"):
        resolve_device("tpu")
    if torch.cuda.is_available():
        assert resolve_device("auto") == resolve_device("cuda") == "cuda"
    else:
        assert resolve_device("auto") == "cpu"
        with pytest.raises(UserError, match="no CUDA device"):
            resolve_device("cuda")


def test_threads_per_process_keeps_a_given_omp_num_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads_per_process(10_000) == {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "10000"}
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads_per_process(2) == {"GOMP_SPINCOUNT": "10000"}


def test_sockets_use_the_network_interface_of_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    loopback = interface_with("127.0.0.1")
    assert loopback in ("lo", "lo0")
    assert sockets_at("127.0.0.1") == {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    assert interface_with("::1") in (loopback, None)
    assert interface_with(host_address()) in {name for _, name in socket.if_nameindex()}
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    assert sockets_at("127.0.0.1") == {"GLOO_SOCKET_IFNAME": loopback}
    assert (interface_with("198.51.100.7"), sockets_at("198.51.100.7")) == (None, {})
