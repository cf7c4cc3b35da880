"""Channel tests with real socket pairs, threads and a real child process."""

from __future__ import annotations

import math
import socket
import struct
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime.cluster.process import ChildProcess
from slime.cluster.rpc.channel import (
    Channel,
    ChannelClosed,
    ChannelProtocolError,
    ChannelTimeout,
    channel_pair,
)


@pytest.fixture
def ends() -> Any:
    here, other = channel_pair()
    there = Channel(other)
    yield here, there
    here.close()
    there.close()


def send_and_receive(ends: tuple[Channel, Channel], message: Any) -> Any:
    """Send from a thread and receive: a message may be larger than the socket buffer."""
    here, there = ends
    sender = threading.Thread(target=here.send, args=(message,))
    sender.start()
    received = there.recv(120)
    sender.join()
    return received


def test_plain_values_round_trip(ends: Any) -> None:
    message = {
        "none": None, "flags": [True, False], "big": 2**63, "small": -(2**63), "pi": math.pi, "text": "żółw \U0001f422",
        "bytes": b"\x00\xff", "nested": {"a": [[], {}, [1, [2]]]}, 7: "integer key",
    }  # fmt: skip
    assert send_and_receive(ends, message) == message
    assert math.isnan(send_and_receive(ends, float("nan")))
    assert send_and_receive(ends, (1, 2)) == [1, 2]
    assert send_and_receive(ends, {"lone surrogate": "\ud800"}) == {"lone surrogate": "\ud800"}


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.int64).reshape(3, 4),
        np.arange(12, dtype=np.float32).reshape(3, 4).T,
        np.arange(100, dtype=np.int32)[::-3],
        np.zeros((0, 5), dtype=np.float16),
        np.zeros((3, 0, 2), dtype=bool),
        np.array(3.5),
        np.array([True, False, True]),
        np.array([1 + 2j], dtype=np.complex64),
        np.array([1, 2], dtype=">i4"),
        np.array(["2024-01-01"], dtype="datetime64[D]"),
        np.array(["ab", "żółw"]),
        np.array([np.nan, np.inf, -0.0]),
        np.arange(100_000, dtype=np.uint8),
        np.asfortranarray(np.arange(200_000, dtype=np.float64).reshape(400, 500)),
        np.broadcast_to(np.float32(2), (300, 300)),
        np.arange(2_000_000, dtype=np.float16).reshape(4, -1),
        np.zeros((1000, 1000), dtype=bool),
    ],
    ids=lambda a: f"{a.dtype}{a.shape}",
)
def test_arrays_round_trip_and_are_writable(ends: Any, array: np.ndarray) -> None:
    back = send_and_receive(ends, {"x": [array]})["x"][0]
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    np.testing.assert_array_equal(back, array)
    assert back.flags.writeable
    assert back.flags.c_contiguous


def test_arrays_of_mixed_sizes_keep_their_order(ends: Any) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 1000, size=n) for n in (1, 50_000, 3, 20_000, 0, 8192, 8193, 100_000)]
    for sent, back in zip(arrays, send_and_receive(ends, arrays), strict=True):
        np.testing.assert_array_equal(sent, back)


def test_numpy_scalars_become_python_numbers(ends: Any) -> None:
    back = send_and_receive(ends, [np.float32(0.5), np.int64(3), np.bool_(True)])
    assert back == [0.5, 3, True]
    assert [type(value) for value in back] == [float, int, bool]


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, np.array([object()]), np.zeros(2, dtype=[("a", "i4")]), 2**64],
    ids=["object", "set", "array of objects", "array of records", "large integer"],
)
def test_channel_stays_usable_after_rejecting_an_unsupported_value(ends: Any, value: Any) -> None:
    with pytest.raises((TypeError, OverflowError)):
        ends[0].send({"fine": 1, "not": value})
    assert send_and_receive(ends, "still here") == "still here"


def test_timeout_between_messages_loses_nothing(ends: Any) -> None:
    with pytest.raises(ChannelTimeout, match=r"0\.01 s"):
        ends[1].recv(0.01)
    assert send_and_receive(ends, "after") == "after"


def test_recv_can_be_retried_after_a_timeout_inside_a_message() -> None:
    here, other = channel_pair()
    recorder, feed = socket.socketpair()
    array = np.arange(30_000, dtype=np.int64)
    threading.Thread(target=lambda: (here.send({"x": array}), here.close())).start()
    raw = b""
    while piece := other.recv(1 << 20):
        raw += piece
    receiver = Channel(recorder)
    previous = 0
    for cut in (3, 12, 25, 60, 200_000):
        feed.sendall(raw[previous:cut])
        previous = cut
        with pytest.raises(ChannelTimeout):
            receiver.recv(0.02)
    feed.sendall(raw[previous:])
    np.testing.assert_array_equal(receiver.recv(120)["x"], array)


def test_messages_queue_in_order(ends: Any) -> None:
    for i in range(100):
        ends[0].send(i)
    assert [ends[1].recv(120) for _ in range(100)] == list(range(100))


def test_close_is_seen_on_both_sides(ends: Any) -> None:
    here, there = ends
    here.send("last")
    here.close()
    here.close()
    assert there.recv(120) == "last"
    with pytest.raises(ChannelClosed):
        there.recv(120)
    with pytest.raises(ChannelClosed):
        there.send("anyone?")
    with pytest.raises(ChannelClosed):
        here.recv(120)
    with pytest.raises(ChannelClosed):
        here.send(1)


def test_send_times_out_if_the_receiver_reads_nothing(ends: Any) -> None:
    with pytest.raises(ChannelTimeout, match="did not read the message"):
        ends[0].send(np.zeros(10_000_000), timeout_s=0.05)
    with pytest.raises(ChannelClosed):
        ends[0].send("again")


def test_offer_sends_only_if_it_does_not_block(ends: Any) -> None:
    here, there = ends
    sent = 0
    while here.offer({"number": sent}):  # until the buffer of the other side, which reads nothing, is full
        sent += 1
    assert sent > 10
    assert [there.recv(120)["number"] for _ in range(sent)] == list(range(sent))
    with here._send_lock:  # another thread is sending
        assert not here.offer("news")
    assert here.offer("news")
    assert there.recv(120) == "news"
    there.close()
    assert not here.offer("news")
    here.close()
    assert not here.offer("news")


def test_size_limit_holds_for_send_and_recv() -> None:
    here, other = channel_pair(max_bytes=1000)
    with pytest.raises(ValueError, match="1000"):
        here.send(np.zeros(1000))
    other.sendall(struct.pack("<Q", 1001))
    with pytest.raises(ChannelProtocolError, match="1001 bytes"):
        here.recv(120)


@pytest.mark.parametrize(
    "frame",
    [struct.pack("<QQI", 12, 5, 0), struct.pack("<QQI", 12, 0, 2**31), struct.pack("<QQIQ", 20, 0, 1, 99)],
    ids=["body too long", "too many parts", "buffer too long"],
)
def test_frames_with_inconsistent_sizes_are_rejected(frame: bytes) -> None:
    here, other = channel_pair()
    other.sendall(frame)
    with pytest.raises(ChannelProtocolError):
        here.recv(120)


def test_threads_may_send_concurrently(ends: Any) -> None:
    here, there = ends
    threads = [
        threading.Thread(target=lambda k=k: [here.send([k, np.full(20_000, k)]) for _ in range(20)]) for k in range(4)
    ]
    for thread in threads:
        thread.start()
    received = [there.recv(120) for _ in range(80)]
    for thread in threads:
        thread.join()
    assert all((array == k).all() and array.size == 20_000 for k, array in received)
    assert sorted(k for k, _ in received) == sorted(list(range(4)) * 20)


CHILD = """
import sys
from slime.cluster.rpc.channel import Channel
channel = Channel.from_fd(int(sys.argv[1]))
while True:
    message = channel.recv(None)
    if isinstance(message, str):
        import os
        os._exit(9)
    channel.send({"sum": float(message.sum()), "back": message * 2})
"""


def test_child_process_answers_and_its_death_closes_the_channel(tmp_path: Path) -> None:
    channel, theirs = channel_pair()
    argv = [sys.executable, "-c", CHILD, str(theirs.fileno())]
    with ChildProcess("echo", argv, log_path=tmp_path / "log", pass_fds=[theirs.fileno()]) as child:
        theirs.close()
        array = np.arange(500_000, dtype=np.float64)
        channel.send(array)
        answer = channel.recv(120)
        assert answer["sum"] == 499_999 * 500_000 / 2
        np.testing.assert_array_equal(answer["back"], np.arange(0, 1_000_000, 2))
        channel.send("die")
        with pytest.raises(ChannelClosed):
            channel.recv(120)
        assert child.wait(120) == 9
