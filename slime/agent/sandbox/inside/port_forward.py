"""Forwards a port in another process's network namespace to an address outside it; arguments `LIFE_FD PID TARGET`.

Used for containers, which have no network: nothing has to be installed in their image. The program reports the port on
the life socket and exits when the other end of that socket closes.
"""

from __future__ import annotations

import os
import selectors
import socket
import sys

from . import fd_messages, relay, syscalls


def main_port_forward() -> None:
    """Listen inside the namespace and forward connections to the target outside."""
    life = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(life.fileno(), False)
    try:
        listener = open_listener_inside(int(sys.argv[2]))
    except OSError as error:
        fd_messages.send(life, {"error": error.strerror or str(error)})
        return
    fd_messages.send(life, {"port": listener.getsockname()[1]})
    selector = selectors.DefaultSelector()
    relay.Relay(selector).serve(listener, sys.argv[3])
    over: list[bool] = []
    selector.register(life, selectors.EVENT_READ, lambda events: over.append(True))
    while not over:
        for key, events in selector.select():
            key.data(events)


def open_listener_inside(pid: int) -> socket.socket:
    """Open a listening socket on another process's loopback interface; this process keeps its own namespace."""
    ours, theirs = socket.socketpair()

    def listen() -> None:
        ours.close()
        try:
            syscalls.enter_network(pid)
            with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
                fd_messages.send(theirs, {}, [listener.fileno()])
        except OSError as error:
            fd_messages.send(theirs, {"error": error.strerror or str(error)})

    child = syscalls.run_in_fork(listen)
    theirs.close()
    with ours:
        received = fd_messages.receive(ours)
    os.waitpid(child, 0)
    if received is None or "error" in received[0]:
        raise OSError(1, "no response" if received is None else received[0]["error"])
    return socket.socket(fileno=received[1][0])
