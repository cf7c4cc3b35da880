"""Decoding on CUDA: one captured graph per batch size, replayed for every token.

Invariant: everything a graph reads lives at a fixed address (the input buffers, the KV slots, the weights, which are
updated in place), so a replay sees the present values. Batches are padded to the next captured size with rows that
write to slot 0.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch

from slime.engine.embedded.model.attention_cuda import attend_decode
from slime.engine.embedded.model.runner import ModelRunner, Sampled, record_top
from slime.engine.embedded.model.sampler import SamplingRows, draw, draw_each, uniforms
from slime.engine.embedded.sequence import Sequence

log = logging.getLogger(__name__)

_RING = 4  # at most two steps are in flight


@dataclass
class OnDevice:
    """A launched step: its tokens on the device, and where its results arrive on the host once `done`."""

    tokens: torch.Tensor
    results: torch.Tensor
    count: int
    done: torch.cuda.Event


class CudaDecoder:
    """Replays a graph for every step. The host's buffers are a ring: a step in flight keeps its own."""

    looks_ahead = True

    def __init__(self, runner: ModelRunner, *, max_running: int, compile_model: bool) -> None:
        self._runner = runner
        self._context = runner.context
        self._attend = attend_decode(runner.context)
        self._body = torch.compile(runner.body, dynamic=True) if compile_model else runner.body
        self._dummy_row = max_running
        device = runner.device
        self._inputs = torch.zeros(4, max_running, dtype=torch.int64, device=device)  # rows, lens, slots, last tokens
        self._lens = torch.zeros(max_running, dtype=torch.int32, device=device)
        self._sampling = SamplingRows(max_running, device)
        self._uniform = torch.zeros(max_running, device=device)
        self._ring = itertools.cycle([_HostBuffers(max_running) for _ in range(_RING)])
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._sizes = _batch_sizes(max_running)

    def capture(self) -> None:
        """Capture every batch size, largest first so that the smaller ones fit into its memory."""
        started = time.perf_counter()
        pool = torch.cuda.graph_pool_handle()
        self._upload(next(self._ring), 0)
        with torch.inference_mode():
            for size in reversed(self._sizes):
                stream = torch.cuda.Stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    for _ in range(2):
                        self._step(size)
                torch.cuda.current_stream().wait_stream(stream)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    outputs = self._step(size)
                self._graphs[size] = (graph, *outputs)
        log.info("captured %d decode graphs in %.1f s", len(self._sizes), time.perf_counter() - started)

    def _step(self, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows, lens, slots, tokens = self._inputs[:, :size].unbind(0)
        self._lens[:size].copy_(lens)
        self._context.table[rows, lens - 1] = slots.int()
        self._context.rows, self._context.lens, self._context.slots = rows, self._lens[:size], slots
        self._context.attend = self._attend
        self._runner.states.spans, self._runner.states.rows = None, rows
        ids, positions = tokens[None], (lens - 1)[None]
        hidden = self._body(input_ids=ids, position_ids=positions, use_cache=False)[0][0]
        logits = self._runner.logits(hidden)
        sampling = self._sampling
        drawn, logprobs = draw(logits, sampling.temperature[:size], self._uniform[:size], sampling.greedy[:size])
        return drawn, logprobs, logits

    def _upload(self, host: _HostBuffers, used: int) -> None:
        """Rows behind the batch write to slot 0 of the dummy row, at position 0."""
        host.inputs[0, used:] = self._dummy_row
        host.inputs[1, used:] = 1
        host.inputs[2:, used:] = 0
        self._inputs.copy_(host.inputs, non_blocking=True)
        self._uniform.copy_(host.uniform, non_blocking=True)

    @torch.inference_mode()
    def launch(self, running: SequenceOf[Sequence], slots: np.ndarray, previous: OnDevice | None) -> OnDevice:
        count, ahead = len(running), 0 if previous is None else 1
        size = next(s for s in self._sizes if s >= count)
        host = next(self._ring)
        inputs = host.inputs.numpy()
        inputs[0, :count] = [s.row for s in running]
        inputs[1, :count] = [s.length + ahead for s in running]
        inputs[2, :count] = slots
        if previous is None:
            inputs[3, :count] = [s.output_ids[-1] if s.output_ids else s.prompt_ids[-1] for s in running]
        host.uniform.numpy()[:count] = uniforms(running, ahead)
        self._runner.make_states(running, (inputs[1, :count] - 1).tolist())
        held, rows = self._runner.states.held, inputs[0, :count].copy()
        held[rows] = -1
        self._runner.set_table(inputs[0, :count], inputs[1, :count] - 1, slots)
        self._upload(host, count)
        if previous is not None:
            self._inputs[3, :count].copy_(previous.tokens)
        self._sampling.hold(running)
        graph, drawn, logprobs, logits = self._graphs[size]
        graph.replay()
        held[rows] = inputs[1, :count]
        if all(s.plain for s in running):
            tokens, scores = drawn[:count].clone(), logprobs[:count]
        else:
            tokens, scores = draw_each(logits[:count], running, self._uniform[:count], self._sampling.greedy[:count])
            record_top(logits[:count], running)
        host.results[:, :count].copy_(torch.stack([tokens.double(), scores.double()]), non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return OnDevice(tokens, host.results, count, done)

    def collect(self, launched: OnDevice) -> Sampled:
        launched.done.synchronize()
        results = launched.results[:, : launched.count]
        return results[0].long().tolist(), results[1].tolist()


class _HostBuffers:
    """Pinned memory for what one step sends and gets back."""

    def __init__(self, size: int) -> None:
        self.inputs = torch.zeros(4, size, dtype=torch.int64, pin_memory=True)
        self.uniform = torch.zeros(size, pin_memory=True)
        self.results = torch.zeros(2, size, dtype=torch.float64, pin_memory=True)


def _batch_sizes(most: int) -> list[int]:
    """Powers of two, then multiples of 64: a padded row costs its share of the matrix products and no attention.

    Size 1 is padded as well: compilers specialise on it.
    """
    sizes = [2, 4, 8, 16, 32, 64, *range(128, most, 64)]
    return [s for s in sizes if s < most] + [most]
