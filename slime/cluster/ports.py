"""Finds free ports on this machine, and the network interface for connections between its processes.

Automatic ports are below the range that the system uses for outgoing connections, so no connection can take a port
between the check and the server's bind.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import random
import socket
from urllib.parse import urlsplit

from slime.errors import UserError

_FIRST_AUTOMATIC = 15000
_LAST_AUTOMATIC = 31999


def free_port(host: str = "127.0.0.1") -> int:
    return free_ports(1, host)[0]


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    candidates = list(range(_FIRST_AUTOMATIC, _LAST_AUTOMATIC + 1))
    random.SystemRandom().shuffle(candidates)
    found: list[int] = []
    for port in candidates:
        if len(found) == count:
            return found
        if _bind_error(host, port) is None:
            found.append(port)
    raise UserError(f"there are no {count} free ports between {_FIRST_AUTOMATIC} and {_LAST_AUTOMATIC} on {host}")


def free_range(first: int, count: int = 1) -> int:
    """Return the lowest port from `first` on that starts `count` consecutive free ports."""
    for start in range(first, 65536 - count + 1):
        if all(port_is_free(port) for port in range(start, start + count)):
            return start
    raise UserError(f"there are no {count} free ports in a row from {first} on")


def port_is_free(port: int) -> bool:
    """Return True if a server can listen on this port of loopback now."""
    return _bind_error("127.0.0.1", port) is None


def host_address() -> str:
    """Return the address by which others reach this machine: `SLIME_HOST_IP`, else from its routes."""
    if given := os.environ.get("SLIME_HOST_IP"):
        return given
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address reserved for documentation; nothing is sent
            return str(probe.getsockname()[0])
        except OSError:  # no route leads out
            return "127.0.0.1"


def own_address(url: str) -> str:
    """Return the address under which a process at `url` reaches this machine."""
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing: only chooses the interface
        return str(probe.getsockname()[0])


def require_free_port(port: int, host: str = "127.0.0.1", *, flag: str) -> int:
    """Return `port` if a server can listen on it; otherwise raise a UserError that names the flag it came from."""
    error = _bind_error(host, port)
    if error is None:
        return port
    if error.errno == errno.EADDRINUSE:
        raise UserError(f"port {port} on {host} is in use: choose another one with {flag}, or stop its server")
    raise UserError(f"a server can't listen on {host}:{port} ({error.strerror}): choose another port with {flag}")


def is_loopback(address: str) -> bool:
    """Return True if a server bound to this address is reachable only from its own machine."""
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:  # a name, or a wildcard such as an empty one
        return address == "localhost"


def sockets_at(address: str) -> dict[str, str]:
    """Return the environment that keeps the sockets of gloo and NCCL on the interface with this address.

    By default they listen on the interface of the host's name or on the first network card, open to other machines.
    Variables already set stay; if no interface has the address, gloo and NCCL choose one.
    """
    found = interface_with(address)
    wanted = {} if found is None else {"GLOO_SOCKET_IFNAME": found, "NCCL_SOCKET_IFNAME": found}
    return {name: value for name, value in wanted.items() if name not in os.environ}


def interface_with(address: str) -> str | None:
    """Return the name of this machine's network interface with the address, or None."""
    import psutil  # here, because all processes import this file

    wanted = ipaddress.ip_address(address)
    for name, found in psutil.net_if_addrs().items():
        for one in found:
            is_ip = one.family in (socket.AF_INET, socket.AF_INET6)
            if is_ip and ipaddress.ip_address(one.address.partition("%")[0]) == wanted:
                return str(name)
    return None


def listening_socket(address: str, port: int) -> socket.socket:
    """Return a socket that listens on this address only."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen()
    except BaseException:
        listener.close()
        raise
    return listener


def _bind_error(host: str, port: int) -> OSError | None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise UserError(f"--host {host} is not an address of this machine ({error.strerror})") from error
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            return error
    return None
