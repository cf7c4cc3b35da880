"""The listener of a run accepts only processes that prove the run's token and have an expected name."""

from __future__ import annotations

import argparse
import contextlib
import resource
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from slime.cluster.rpc import connect as connection
from slime.cluster.rpc.channel import Channel, ChannelClosed, ChannelTimeout
from slime.cluster.rpc.connect import TOKEN_VARIABLE, Listener, add_channel_flags, channel_from, connect
from slime.errors import UserError
from tests.e2e.runs import wait_until


@pytest.fixture
def listener() -> Iterator[Listener]:
    one = Listener("127.0.0.1", "right")
    yield one
    one.close()


def flags(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_channel_flags(parser)
    return parser.parse_args(words)


def is_closed_by_peer(sock: socket.socket) -> bool:
    sock.settimeout(120)
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_process_with_the_token_connects_and_drops_it_from_its_env(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "right")
    with channel_from(flags(*listener.connect_arguments("trainer-0"))) as theirs:
        ours = listener.wait_for("trainer-0", 120)
        theirs.send({"said": 1})
        assert ours.recv(120) == {"said": 1}
        ours.send("heard")
        assert theirs.recv(120) == "heard"
    assert TOKEN_VARIABLE not in connection.os.environ
    with pytest.raises(ChannelClosed):
        ours.recv(120)


def test_inherited_socket_needs_no_token() -> None:
    ours, theirs = socket.socketpair()
    with channel_from(flags("--fd", str(theirs.detach()))) as channel, Channel(ours) as other:
        channel.send("here")
        assert other.recv(120) == "here"


@pytest.mark.parametrize(
    ("token", "name"), [("wrong", "trainer-0"), ("right", "trainer-7"), ("", "trainer-0"), ("wrong", "trainer-7")]
)
def test_rejects_wrong_token_or_name_and_still_accepts_the_expected(listener: Listener, token: str, name: str) -> None:
    listener.connect_arguments("trainer-0")
    with pytest.raises(ChannelClosed, match=f"refused {name}: the token is another run's, or {name} is not expected"):
        connect("127.0.0.1", listener.port, name=name, token=token)
    connect("127.0.0.1", listener.port, name="trainer-0", token="right").close()
    listener.wait_for("trainer-0", 120).close()


def test_each_name_can_connect_once(listener: Listener) -> None:
    listener.connect_arguments("trainer-0")
    with connect("127.0.0.1", listener.port, name="trainer-0", token="right") as first:
        assert wait_until(lambda: "trainer-0" in listener._came, 120)
        with pytest.raises(ChannelClosed, match="refused trainer-0"):
            connect("127.0.0.1", listener.port, name="trainer-0", token="right")
        first.send("still me")
        assert listener.wait_for("trainer-0", 120).recv(120) == "still me"


def test_garbage_or_partial_proof_closes_only_that_connection(listener: Listener) -> None:
    listener.connect_arguments("trainer-0")
    for said in (b"GET / HTTP/1.1\r\n\r\n" + bytes(1000), b"\xff" * 128, b"short"):
        with socket.create_connection(("127.0.0.1", listener.port)) as stranger:
            assert len(stranger.recv(32, socket.MSG_WAITALL)) == 32
            stranger.sendall(said)
            with contextlib.suppress(OSError):  # already disconnected
                stranger.shutdown(socket.SHUT_WR)
            assert is_closed_by_peer(stranger)
    connect("127.0.0.1", listener.port, name="trainer-0", token="right").close()
    listener.wait_for("trainer-0", 120).close()


def test_silent_or_slow_connections_time_out_and_block_no_others(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slow client sends each byte in time but exceeds the deadline for the whole proof."""
    listener.connect_arguments("trainer-0")
    monkeypatch.setattr(connection, "_PROOF_S", 600.0)
    with unauthenticated_connection(listener):
        connect("127.0.0.1", listener.port, name="trainer-0", token="right").close()
        listener.wait_for("trainer-0", 120).close()
    monkeypatch.setattr(connection, "_PROOF_S", 0.5)
    with (
        unauthenticated_connection(listener) as silent,
        unauthenticated_connection(listener) as slow,
        ThreadPoolExecutor(1) as pool,
    ):

        def dribble() -> int:
            for count in range(1000):
                try:
                    slow.sendall(b"x")
                    slow.settimeout(0.2)
                    if slow.recv(1) == b"":
                        return count
                except TimeoutError:
                    continue
                except ConnectionError:
                    return count
            raise AssertionError("a thousand bytes, one at a time, were taken")

        dribbling = pool.submit(dribble)
        assert is_closed_by_peer(silent)
        assert dribbling.result(240) < 128  # before the proof was complete


@contextlib.contextmanager
def unauthenticated_connection(listener: Listener) -> Iterator[socket.socket]:
    """A connection that has received the challenge and sent no proof."""
    with socket.create_connection(("127.0.0.1", listener.port)) as stranger:
        assert len(stranger.recv(32, socket.MSG_WAITALL)) == 32
        yield stranger


def test_unauthenticated_connections_are_capped_and_use_no_threads(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_PROOF_S", 600.0)
    monkeypatch.setattr(connection, "_MOST_STRANGERS", 8, raising=False)
    threads = threading.active_count()
    listener.connect_arguments("trainer-0")
    with contextlib.ExitStack() as crowd:
        strangers = [crowd.enter_context(unauthenticated_connection(listener)) for _ in range(40)]
        assert threading.active_count() == threads
        assert all(is_closed_by_peer(one) for one in strangers[:30])  # the oldest connections
        connect("127.0.0.1", listener.port, name="trainer-0", token="right").close()
        listener.wait_for("trainer-0", 120).close()
        assert len(listener._strangers) <= 9


def test_listener_out_of_descriptors_drops_unauthenticated_connections(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_PROOF_S", 600.0)
    listener.connect_arguments("trainer-0")
    with unauthenticated_connection(listener) as stranger, socket.socket() as next_one:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.ExitStack() as until_now:
            until_now.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
            resource.setrlimit(resource.RLIMIT_NOFILE, (next_one.fileno() + 1, limits[1]))
            next_one.connect(("127.0.0.1", listener.port))
            assert is_closed_by_peer(stranger)
    connect("127.0.0.1", listener.port, name="trainer-0", token="right").close()
    listener.wait_for("trainer-0", 120).close()


def test_connect_rejects_a_listener_without_the_token() -> None:
    """Another program listens on the run's port: the process sends it nothing more."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:

        def pretend() -> bytes:
            sock, _ = server.accept()
            with sock:
                sock.sendall(bytes(32))
                sock.recv(128, socket.MSG_WAITALL)
                sock.sendall(bytes(32))
                return sock.recv(1)

        pretending = pool.submit(pretend)
        with pytest.raises(ChannelClosed, match="does not know this run's token"):
            connect("127.0.0.1", server.getsockname()[1], name="trainer-0", token="right")
        assert pretending.result(120) == b""


def test_wait_timeout_names_the_process_and_stops_expecting_it(listener: Listener) -> None:
    listener.connect_arguments("trainer-3")
    with pytest.raises(ChannelTimeout, match=r"trainer-3 did not connect to 127\.0\.0\.1"):
        listener.wait_for("trainer-3", 0.01)
    with pytest.raises(ChannelClosed):
        connect("127.0.0.1", listener.port, name="trainer-3", token="right")


def test_close_drops_waiting_connections_and_rejects_new_ones(listener: Listener) -> None:
    listener.connect_arguments("trainer-0")
    with connect("127.0.0.1", listener.port, name="trainer-0", token="right") as came:
        came.send("early")  # connected: the proof was answered
        listener.close()
        listener.close()
        with pytest.raises(ChannelClosed):
            came.recv(120)
    with pytest.raises(OSError, match="refused"):
        connect("127.0.0.1", listener.port, name="trainer-0", token="right")


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only Linux has TCP_USER_TIMEOUT")
def test_both_sides_set_tcp_keepalive_and_user_timeout(listener: Listener) -> None:
    listener.connect_arguments("trainer-0")
    with connect("127.0.0.1", listener.port, name="trainer-0", token="right") as theirs:
        for channel in (theirs, listener.wait_for("trainer-0", 120)):
            asked = [socket.TCP_USER_TIMEOUT, socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT]
            values = [channel._sock.getsockopt(socket.IPPROTO_TCP, option) for option in asked]
            assert values == [120_000, 30, 30, 3]


@pytest.mark.parametrize(
    ("word", "token", "sentence"),
    [
        ("127.0.0.1/trainer-0", "right", "is not of the form HOST:PORT/NAME"),
        ("127.0.0.1:80", "right", "is not of the form HOST:PORT/NAME"),
        ("127.0.0.1:80/trainer-0", None, "needs the run's token in SLIME_RUN_TOKEN"),
    ],
)
def test_invalid_connect_flags_are_rejected(
    monkeypatch: pytest.MonkeyPatch, word: str, token: str | None, sentence: str
) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    if token is not None:
        monkeypatch.setenv(TOKEN_VARIABLE, token)
    with pytest.raises(UserError, match=sentence):
        channel_from(flags("--connect", word))
