"""The CUDA decoder on the CPU: graphs run their steps, kernels are plain operations over the device's slot table."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any

import torch

from slime.engine.embedded.engine import EngineCore
from slime.engine.embedded.model.attention import Rules, _attention_spelled_out
from slime.engine.embedded.model.cpu_sampler import draw, draw_each
from slime.engine.embedded.model.cuda_graphs import CudaDecoder
from slime.engine.embedded.model.interface import DecodeBatch, DeviceSampler, DrawBatch
from slime.engine.embedded.model.prefill_kernels import ExtendTiles
from slime.engine.embedded.model.runner import ModelRunner, record_top
from slime.engine.embedded.scheduler import Sequence


class TableBody:
    """A body that reads the inputs of the kernels: table, rows and lengths of the batch or tiles, tokens by row."""

    fewest_rows = 1
    extends_in_graphs = True

    def __init__(self, runner: ModelRunner) -> None:
        self._runner, self._context = runner, runner.context
        self._pieces: list[tuple[int, int, int, int]] = []  # table row, first query, queries, keys

    def decode(self, batch: DecodeBatch) -> torch.Tensor:
        rows, lens = batch.rows, batch.lens
        ids = torch.where(batch.known < 0, batch.tokens[rows], batch.known)
        self._context.table[rows, lens - 1] = batch.slots.int()
        self._pieces = [(row, i, 1, n) for i, (row, n) in enumerate(zip(rows.tolist(), lens.tolist(), strict=True))]
        return self._runner.logits(self._hidden(ids, lens - 1, batch.slots))

    def extend(
        self, ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, tiles: ExtendTiles
    ) -> torch.Tensor:
        lists = (x.tolist() for x in (tiles.rows, tiles.first_query, tiles.count, tiles.position))
        self._pieces = [(row, first, n, at + n) for row, first, n, at in zip(*lists, strict=True) if n]
        return self._hidden(ids, positions, slots)

    def _hidden(self, ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        self._context.slots, self._context.attend = slots, self._attend
        return self._runner.hidden(ids[None], positions[None])

    def _attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: Rules) -> torch.Tensor:
        keys, values = self._context._keep(layer, k, v)
        out = q.new_zeros(q.shape[2], q.shape[1], v.shape[3])
        for row, first, m, n in self._pieces:
            kept = self._context.table[row, :n].long()
            seen = torch.arange(n) <= torch.arange(n - m, n)[:, None]
            mixed = _attention_spelled_out(
                q[:, :, first : first + m], keys[None, :, kept], values[None, :, kept], seen[None, None], rules
            )
            out[first : first + m] = mixed[0].transpose(0, 1)
        return out


class TorchDraw:
    """Sampling in plain torch operations; special settings are read from the host's copy of a sequence."""

    def plain(self, logits: torch.Tensor, batch: DrawBatch) -> None:
        self._put(batch, *draw(logits, batch.temperature, batch.uniform, batch.greedy > 0))

    def special(
        self, logits: torch.Tensor, batch: DrawBatch, sequences: SequenceOf[Sequence], ahead: SequenceOf[int]
    ) -> None:
        record_top(logits, sequences)
        self._put(batch, *draw_each(logits, sequences, batch.uniform, batch.greedy > 0))

    def foresees(self, seq: Sequence) -> bool:
        return seq.plain

    def _put(self, batch: DrawBatch, drawn: torch.Tensor, logprobs: torch.Tensor) -> None:
        batch.tokens[batch.rows] = drawn
        batch.results.copy_(torch.stack([drawn.double(), logprobs.double()], 1))


class DecoderOnCpu(CudaDecoder):
    """A decoder whose graph replay runs the step itself."""

    def _captured(self, run: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
        outputs = run()
        return lambda: outputs.copy_(run()), outputs

    def _capture_resources(self) -> tuple[Any, Any]:
        return None, None


def decode_as_on_cuda(core: EngineCore, draw: DeviceSampler | None = None) -> DecoderOnCpu:
    """Make a loaded engine on the CPU run its steps as on CUDA."""
    core.runner.context.table = torch.zeros(core.scheduler.table.shape, dtype=torch.int32)
    rows = core.scheduler.max_running
    decoder = DecoderOnCpu(core.runner, TableBody(core.runner), draw or TorchDraw(), max_running=rows)
    decoder.capture()
    core.steps.decoder = decoder
    return decoder
