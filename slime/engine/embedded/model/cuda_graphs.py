"""Steps on CUDA: captured graphs for decoding and for short prompts, launched asynchronously.

Invariant: everything a graph reads is at a fixed address (the input buffers, the KV slots, the weights, which are
updated in place), so a replay sees the current values. Copies to and from the device use pinned memory, so launching a
step never waits for the previous one. Batches are padded to the next captured size with rows that write to slot 0.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from slime.engine.embedded.model.cpu_sampler import temperature_of, uniforms_at
from slime.engine.embedded.model.gated_delta_net import group_pieces
from slime.engine.embedded.model.interface import DecodeBatch, DeviceModel, DeviceSampler, DrawBatch
from slime.engine.embedded.model.prefill_kernels import ExtendTiles
from slime.engine.embedded.model.runner import ModelRunner, Sampled, last_token
from slime.engine.embedded.scheduler import Extend, Sequence

log = logging.getLogger(__name__)

T = TypeVar("T")

_PROMPT_TOKENS = (128, 256, 512, 1024, 2048)  # captured sizes of extend steps; longer steps hide launch overhead


@dataclass
class LaunchedStep:
    """A launched step; its results are on the host once `done`."""

    results: torch.Tensor  # [rows, 2], pinned
    done: torch.cuda.Event | None
    arrived: Callable[[], None] | None = None  # called after that


class CudaDecoder:
    """Replays a graph for every decode step and for extend steps of few tokens."""

    looks_ahead = True

    def __init__(self, runner: ModelRunner, body: DeviceModel, draw: DeviceSampler, *, max_running: int) -> None:
        self._runner = runner
        self._body = body
        self._draw = draw
        self._dummy_row = max_running
        self._device = runner.device
        self._inputs = _StepInputs(max_running, self._device)
        self._tokens = torch.zeros(max_running + 1, dtype=torch.int64, device=self._device)
        self._results = torch.zeros(max_running, 2, dtype=torch.float64, device=self._device)
        self._graphs: dict[int, tuple[Callable[[], object], torch.Tensor]] = {}  # replay, logits
        self._prompts: dict[int, _PromptGraph] = {}
        self._members = _BatchConstants([])
        self._sizes = batch_sizes(body.fewest_rows, max_running)
        self._side_stream, self._pool = self._capture_resources()
        # the largest first, so that the others fit into its memory; the largest and the smallest decode any batch
        self._uncaptured = [max_running, *(s for s in self._sizes[:1] if s < max_running)]
        self._uncaptured += reversed(self._sizes[1:-1])
        self._uncaptured_prompts = sorted(_PROMPT_TOKENS, reverse=True) if body.extends_in_graphs else []

    def capture(self) -> None:
        """Capture the graphs needed to start; `capture_next` captures the others."""
        started = time.perf_counter()
        while self._uncaptured and len(self._graphs) < 2:
            self._capture_one()
        log.info("captured %d decode graphs in %.1f s", len(self._graphs), time.perf_counter() - started)

    def capture_next(self) -> bool:
        """Capture one more graph, at any time between two steps; returns False when all are captured.

        A graph that cannot be captured is skipped: larger graphs run such batches, and extend steps need no graph.
        """
        try:
            self._capture_one()
        except Exception as error:  # steps run without it
            log.warning("a CUDA graph could not be captured: steps of its size take longer", exc_info=error)
        return bool(self._uncaptured or self._uncaptured_prompts)

    @torch.inference_mode()
    def _capture_one(self) -> None:
        if self._uncaptured:
            size = self._uncaptured.pop(0)
            self._inputs.load(self._host_inputs(0, self._inputs.most))

            def step() -> torch.Tensor:
                logits = self._body.decode(self._inputs.decode_batch(size, self._tokens))
                self._draw.plain(logits, self._inputs.draw_batch(size, self._tokens, self._results))
                return logits

            self._graphs[size] = self._captured(step)
        elif self._uncaptured_prompts:
            size = self._uncaptured_prompts.pop(0)
            graph = _PromptGraph(size, min(size, self._inputs.most), self._device)
            ids, positions, slots = graph.numbers.unbind(0)
            graph.replay, graph.hidden = self._captured(lambda: self._body.extend(ids, positions, slots, graph.tiles))
            self._prompts = {size: graph, **self._prompts}

    def _capture_resources(self) -> tuple[torch.cuda.Stream, Any]:
        """Return the stream of all captures, since memory used in a stream stays with it, and the graphs' pool."""
        return torch.cuda.Stream(), torch.cuda.graph_pool_handle()

    def _captured(self, run: Callable[[], T]) -> tuple[Callable[[], object], T]:
        """Capture `run`; returns the replay function and what `run` returned during the capture."""
        stream, graph = self._side_stream, torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                run()
            stream.synchronize()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                outputs = run()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        return graph.replay, outputs

    # decode

    @torch.inference_mode()
    def launch(self, running: SequenceOf[Sequence], slots: np.ndarray, ahead: SequenceOf[int]) -> LaunchedStep:
        count = len(running)
        size = min(s for s in self._graphs if s >= count)
        host = self._host_inputs(count, size)
        numbers, floats = host.numbers.numpy(), host.floats.numpy()
        rows = numbers[0, :count]
        rows[:] = [s.row for s in running]
        if self._members.sequences != running:
            self._members = _BatchConstants(running)
        members = self._members
        drawn = np.array([len(s.output_ids) + more for s, more in zip(running, ahead, strict=True)])
        lens = numbers[1, :count]
        lens[:] = members.prompts + drawn
        numbers[2, :count] = slots
        numbers[3, :count] = [-1 if more else last_token(s) for s, more in zip(running, ahead, strict=True)]
        floats[:, :count] = members.drawing(drawn)
        self._rebuild_states(running, (lens - 1).tolist())
        held = self._runner.states.held
        held[rows] = -1
        self._runner.set_table(rows, lens - 1, slots)
        self._inputs.load(host)
        replay, logits = self._graphs[size]
        replay()
        held[rows] = lens
        batch = self._inputs.draw_batch(count, self._tokens, self._results)
        arrived = self._redraw(logits[:count], batch, running, ahead)
        return self._copy_to_host(self._results[:count], arrived)

    def _host_inputs(self, used: int, size: int) -> _StepInputs:
        """Make pinned inputs; the rows from `used` to `size` write to slot 0 of the dummy row, at position 0."""
        host = _StepInputs(self._inputs.most, None)
        host.numbers.numpy()[:, used:size] = [[self._dummy_row], [1], [0], [0]]
        host.floats.numpy()[:, used:size] = [[0.0], [1.0], [0.0]]
        return host

    def _redraw(
        self, logits: torch.Tensor, batch: DrawBatch, sequences: SequenceOf[Sequence], ahead: SequenceOf[int]
    ) -> Callable[[], None] | None:
        if all(s.plain for s in sequences):
            return None
        return self._draw.special(logits, batch, sequences, ahead)

    def _copy_to_host(self, results: torch.Tensor, arrived: Callable[[], None] | None) -> LaunchedStep:
        """Copy results to the host asynchronously; both sides must be contiguous, or the copy would block."""
        host = _pinned(results.shape, results.dtype)
        host.copy_(results, non_blocking=True)
        return LaunchedStep(host, _record_event(self._device), arrived)

    def collect(self, launched: LaunchedStep) -> Sampled:
        if launched.done is not None:
            launched.done.synchronize()
        if launched.arrived is not None:
            launched.arrived()
        tokens, logprobs = launched.results.numpy().T
        return tokens.astype(np.int64).tolist(), logprobs.tolist()

    def foresees(self, seq: Sequence) -> bool:
        return self._draw.foresees(seq)

    # extend

    @torch.inference_mode()
    def launch_extend(self, extends: list[Extend]) -> LaunchedStep:
        """Compute the pieces and sample a token for each one that `is_sampled`, in order."""
        self._rebuild_states([e.sequence for e in extends], [e.start for e in extends])
        hidden = self._pieces(extends)
        ends = np.cumsum([e.end - e.start for e in extends])
        self._runner.score_prompts(extends, hidden, ends)
        wanted = [i for i, e in enumerate(extends) if e.is_sampled]
        if not wanted:
            return LaunchedStep(_pinned((0, 2), torch.float64), _record_event(self._device))
        sequences = [extends[i].sequence for i in wanted]
        ahead = [0] * len(wanted)
        drawing = _BatchConstants(sequences).drawing(np.array([len(s.output_ids) for s in sequences]))
        rows, last, floats = _upload([np.array([s.row for s in sequences]), ends[wanted] - 1, drawing], self._device)
        logits = self._runner.logits(hidden[last])
        results = torch.empty(len(wanted), 2, dtype=torch.float64, device=self._device)
        uniform, temperature, greedy = floats.unbind(0)
        batch = DrawBatch(rows, uniform, temperature, greedy, self._tokens, results)
        self._draw.plain(logits, batch)
        return self._copy_to_host(results, self._redraw(logits, batch, sequences, ahead))

    def _pieces(self, extends: list[Extend]) -> torch.Tensor:
        """Return the last hidden states `[T, H]` of the pieces, concatenated; a captured graph may pad the end."""
        rows, starts, ends = (
            np.array(x) for x in zip(*((e.sequence.row, e.start, e.end) for e in extends), strict=True)
        )
        ids = np.concatenate([e.sequence.array[e.start : e.end] for e in extends])
        positions = np.concatenate([np.arange(e.start, e.end) for e in extends])
        slots = np.concatenate([e.slots for e in extends])
        tiles = ExtendTiles.plan(rows.tolist(), (ends - starts).tolist(), ends.tolist())
        places, kept = _upload(self._runner.table_entries(rows, ends), self._device)
        self._runner.context.table.view(-1).index_copy_(0, places, kept)
        states = self._runner.states
        if states:
            states.spans = group_pieces(rows.tolist(), starts.tolist(), (ends - starts).tolist(), self._device)
        states.held[rows] = -1
        inputs = np.stack([ids, positions, slots])
        fits = (g for g in self._prompts.values() if g.has_room(inputs.shape[1], tiles.shape[1]))
        if (graph := next(fits, None)) is not None:
            graph.load(inputs, tiles)
            graph.replay()
            hidden = graph.hidden
        else:
            numbers, work = _upload([inputs, tiles], self._device)
            device_ids, device_positions, device_slots = numbers.unbind(0)
            hidden = self._body.extend(device_ids, device_positions, device_slots, ExtendTiles(*work.unbind(0)))
        states.held[rows] = ends
        return hidden

    def _rebuild_states(self, sequences: SequenceOf[Sequence], counts: SequenceOf[int]) -> None:
        if stale := self._runner.stale_states(sequences, counts):
            self._pieces(stale)


class _BatchConstants:
    """Sampling inputs of a batch that do not change while the same sequences are in it.

    The sequences are compared by identity. This holds references to them, so a new sequence cannot be mistaken for an
    old one.
    """

    def __init__(self, sequences: SequenceOf[Sequence]) -> None:
        self.sequences = list(sequences)
        self.prompts = np.array([len(s.prompt_ids) for s in sequences], np.int64)
        self._seeds = np.array([s.seed for s in sequences], np.uint64)
        self._degrees = np.array([temperature_of(s) for s in sequences], np.float32)
        self._greedy = np.array([s.params.greedy for s in sequences], np.float32)

    def drawing(self, drawn: np.ndarray) -> np.ndarray:
        """Return `[3, b]`: uniform numbers after `drawn` tokens each, temperatures and greedy flags."""
        return np.stack([uniforms_at(self._seeds, (drawn + 1).astype(np.uint64)), self._degrees, self._greedy])


class _PromptGraph:
    """A captured extend step of up to `size` tokens in up to `pieces` pieces, padded with empty tiles and slot 0."""

    def __init__(self, size: int, pieces: int, device: torch.device) -> None:
        self.numbers = torch.zeros(3, size, dtype=torch.int64, device=device)
        self._work = torch.zeros(4, size // ExtendTiles.TILE + pieces, dtype=torch.int32, device=device)
        self.tiles = ExtendTiles(*self._work.unbind(0))
        self.replay: Callable[[], object]
        self.hidden: torch.Tensor

    def has_room(self, tokens: int, tiles: int) -> bool:
        return tokens <= self.numbers.shape[1] and tiles <= self._work.shape[1]

    def load(self, inputs: np.ndarray, tiles: np.ndarray) -> None:
        for there, array in ((self.numbers, inputs), (self._work, tiles)):
            host = _pinned(there.shape, there.dtype)
            host.numpy()[:, : array.shape[1]] = array
            host.numpy()[:, array.shape[1] :] = 0
            there.copy_(host, non_blocking=True)


class _StepInputs:
    """Inputs of one decode step in one block of memory: on the device, or pinned on the host (device None)."""

    def __init__(self, most: int, device: torch.device | None) -> None:
        self.most = most
        size = most * (4 * 8 + 3 * 4)
        self._bytes = (
            _pinned((size,), torch.uint8) if device is None else torch.zeros(size, dtype=torch.uint8, device=device)
        )
        self.numbers = self._bytes[: most * 32].view(torch.int64).view(4, most)  # rows, lens, slots, known tokens
        self.floats = self._bytes[most * 32 :].view(torch.float32).view(3, most)  # uniform, temperature, greedy

    def load(self, host: _StepInputs) -> None:
        self._bytes.copy_(host._bytes, non_blocking=True)

    def decode_batch(self, size: int, tokens: torch.Tensor) -> DecodeBatch:
        rows, lens, slots, known = self.numbers[:, :size].unbind(0)
        return DecodeBatch(rows, lens, slots, known, tokens)

    def draw_batch(self, size: int, tokens: torch.Tensor, results: torch.Tensor) -> DrawBatch:
        uniform, temperature, greedy = self.floats[:, :size].unbind(0)
        return DrawBatch(self.numbers[0, :size], uniform, temperature, greedy, tokens, results[:size])


def _pinned(shape: SequenceOf[int], dtype: torch.dtype) -> torch.Tensor:
    """Allocate pinned memory; torch reuses it only after the copies from and to it are done."""
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=torch.cuda.is_available())


def _record_event(device: torch.device) -> torch.cuda.Event | None:
    """Record an event in the stream; None on a device without asynchronous execution."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def _upload(arrays: SequenceOf[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Upload arrays in one copy, each at a multiple of 16 bytes: kernels are compiled for pointer alignment."""
    starts = np.cumsum([0, *(-(-a.nbytes // 16) * 16 for a in arrays)])
    host = _pinned((int(starts[-1]),), torch.uint8)
    for array, start in zip(arrays, starts, strict=False):
        host.numpy()[start : start + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
    there = host.to(device, non_blocking=True)
    return [
        there[start : start + a.nbytes].view(torch.from_numpy(a[:0]).dtype).view(a.shape)
        for a, start in zip(arrays, starts, strict=False)
    ]


def batch_sizes(fewest: int, most: int) -> list[int]:
    """Return the batch sizes to capture: powers of two, then multiples of 64.

    A padded row costs its share of the matrix products and no attention.
    """
    sizes = [1, 2, 4, 8, 16, 32, 64, *range(128, most, 64)]
    return [s for s in sizes if fewest <= s < most] + [most]
