"""Messages as bytes: arrays are separate from the body, sent from their own memory, and joined by the receiver."""

from __future__ import annotations

import numpy as np
import pytest

from slime.cluster.rpc.messages import ConcatenatedArrays, pack, unpack

LARGE = np.random.default_rng(0).integers(0, 1000, 50_000).astype(np.int32)


@pytest.mark.parametrize(
    "parts",
    [
        [LARGE, LARGE[:3], LARGE[:0], LARGE[::2]],
        [LARGE, LARGE.astype(np.int64)],
        [np.ones(90_000, np.int8), np.full(2, 0.5, np.float32), np.broadcast_to(np.int8(1), (5,))],
        [np.zeros((2, 3, 4), np.uint8), np.zeros((0, 3, 4), np.uint8), np.ones((9000, 3, 4), np.uint8)],
        [LARGE[:2], LARGE[:1]],
        [LARGE[:10]] * 3000,
        [],
    ],
    ids=["strided", "int64", "float", "rows", "small", "many", "none"],
)
def test_joined_arrays_unpack_as_one_array(parts: list[np.ndarray]) -> None:
    expected = np.concatenate(parts) if parts else np.empty(0)
    body, packed = pack(ConcatenatedArrays(parts))
    buffers = [np.frombuffer(b"".join(bytes(piece) for piece in buffer.pieces()), np.uint8) for buffer in packed]
    back = unpack(body, buffers)
    assert (back.dtype, back.shape) == (expected.dtype, expected.shape)
    np.testing.assert_array_equal(back, expected)
    np.testing.assert_array_equal(ConcatenatedArrays(parts).whole(), expected)


def test_packed_pieces_share_the_memory_of_the_arrays() -> None:
    parts = [LARGE, LARGE[100:40_000]]
    _, (buffer,) = pack({"x": ConcatenatedArrays(parts)})
    assert all(np.shares_memory(np.asarray(piece), LARGE) for piece in buffer.pieces())
    assert unpack(*pack({"x": 1})) == {"x": 1}


@pytest.mark.parametrize("shape", [(2, 4), (2,)])
def test_joined_rejects_rows_of_different_shapes(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="different shapes"):
        ConcatenatedArrays([np.zeros((2, 3)), np.zeros(shape)])
