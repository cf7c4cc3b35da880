"""Ports for servers on this machine, and the interface on which its processes talk to each other.

Automatic ports lie below the range the system uses for outgoing connections, so that no connection can take one between
the moment it was found free and the moment the server binds it.
"""

from __future__ import annotations

import ctypes
import errno
import ipaddress
import os
import random
import socket
import sys
from urllib.parse import urlsplit

from slime.errors import UserError

_FIRST_AUTOMATIC = 15000
_LAST_AUTOMATIC = 31999


def free_port(host: str = "127.0.0.1") -> int:
    """A port nobody listens on now."""
    return free_ports(1, host)[0]


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """`count` different ports nobody listens on now."""
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
    """The lowest port from `first` on at which `count` ports in a row are free now."""
    for start in range(first, 65536 - count + 1):
        if all(port_is_free(port) for port in range(start, start + count)):
            return start
    raise UserError(f"there are no {count} free ports in a row from {first} on")


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen on this port now."""
    return _bind_error(host, port) is None


def host_address() -> str:
    """The address by which others reach this machine, as `SLIME_HOST_IP`, its routes or its name say."""
    if given := os.environ.get("SLIME_HOST_IP"):
        return given
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address for documents: nothing is sent
            return str(probe.getsockname()[0])
        except OSError:  # no route leads out
            return "127.0.0.1"


def own_address(url: str) -> str:
    """The address under which a process at `url` reaches this machine."""
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing: only chooses the interface
        return str(probe.getsockname()[0])


def require_free_port(port: int, host: str = "127.0.0.1", *, flag: str) -> int:
    """`port` itself, if a server can listen on it; otherwise a UserError that names the flag it came from."""
    error = _bind_error(host, port)
    if error is None:
        return port
    if error.errno == errno.EADDRINUSE:
        raise UserError(f"port {port} on {host} is in use: choose another one with {flag}, or stop who listens there")
    raise UserError(f"a server can't listen on {host}:{port} ({error.strerror}): choose another port with {flag}")


def loopback_sockets() -> dict[str, str]:
    """The environment that keeps the sockets of gloo and NCCL on loopback; what the user has set stays.

    By themselves they listen where the host's name or the first network card leads, for anybody who reaches it.
    """
    names = {name for _, name in socket.if_nameindex()}
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    wanted = {} if loopback is None else {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    return {name: value for name, value in wanted.items() if name not in os.environ}


def is_loopback(address: str) -> bool:
    """Whether only processes of one machine reach a server that binds to this address."""
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:  # a name, or a wildcard as an empty one
        return address == "localhost"


def sockets_at(address: str) -> dict[str, str]:
    """The environment that keeps the sockets of gloo and NCCL on the interface with this address; what the user has set
    stays, and where no interface has it, they choose by themselves."""
    found = interface_with(address)
    wanted = {} if found is None else {"GLOO_SOCKET_IFNAME": found, "NCCL_SOCKET_IFNAME": found}
    return {name: value for name, value in wanted.items() if name not in os.environ}


def interface_with(address: str) -> str | None:
    """The name of this machine's network interface that has the address; None where none has it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    wanted = socket.inet_pton(family, address)
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Interface)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    try:
        one = first
        while one:
            if one.contents.address and _ip_of(one.contents.address, family, len(wanted)) == wanted:
                return os.fsdecode(one.contents.name)
            one = one.contents.next
    finally:
        libc.freeifaddrs(first)
    return None


class _Interface(ctypes.Structure):
    """The beginning of `struct ifaddrs`, which Linux and macOS have in common."""


_Interface._fields_ = [
    ("next", ctypes.POINTER(_Interface)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]


def _ip_of(sockaddr: int, family: int, length: int) -> bytes | None:
    """The IP of a `struct sockaddr`, if it is of this family, which stands in the first two bytes, or in the second."""
    head = ctypes.string_at(sockaddr, 2)
    if (head[1] if sys.platform == "darwin" else int.from_bytes(head, sys.byteorder)) != family:
        return None
    return ctypes.string_at(sockaddr + (8 if family == socket.AF_INET6 else 4), length)


def listening_socket(address: str, port: int) -> socket.socket:
    """A socket that listens on this address alone."""
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
