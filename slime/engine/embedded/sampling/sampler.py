"""Samples tokens on a GPU: the plain kernels run in the captured graph; penalties and cuts are applied after it."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
import triton

from slime.cluster.garbage_collection import gc_disabled_in_all_threads
from slime.engine.embedded.model.cpu_sampler import draw_each
from slime.engine.embedded.model.interface import DrawBatch
from slime.engine.embedded.model.triton_launch import launch
from slime.engine.embedded.sampling import sample_kernels, top_p_kernels
from slime.engine.embedded.sampling.penalties import PenaltyEntries, copy_to_host, put, send
from slime.engine.embedded.sampling_params import SamplingParams
from slime.engine.embedded.scheduler import Sequence

log = logging.getLogger(__name__)

EDITS, CUTS, COUNTS = sample_kernels.EDITS.value, sample_kernels.CUTS.value, sample_kernels.COUNTS.value
_TILE, _MOST_TILES = 8192, 32
_ROOM = 256  # listed tokens per tile in a cut
_PROBES = 3  # passes over the vocabulary before tokens are listed
_BLOCK = 2048  # tokens per iteration where a whole row is read
_ROWS = 32  # rows per batch in torch, to sort them or to find their most likely tokens


class KernelDraw:
    """Samples with Triton kernels for up to `rows` sequences; table row `rows` is padding.

    While a background thread compiles the kernels of `special`, torch samples for the sequences that need them: slowly
    and only after tokens that the host has read, but without waiting for the compiler.
    """

    def __init__(self, rows: int, vocab: int, device: torch.device, *, tile: int = _TILE, room: int = _ROOM) -> None:
        self._rows, self._vocab, self._device = rows, vocab, device
        self._tile = max(tile, triton.next_power_of_2(triton.cdiv(vocab, _MOST_TILES)))
        self._tiles = triton.cdiv(vocab, self._tile)
        self._room = min(room, self._tile)
        self._padded = triton.next_power_of_2(self._tiles)
        self._tops, self._masses = (torch.zeros(rows, self._tiles, device=device) for _ in range(2))
        self._best = torch.zeros(rows, self._tiles, dtype=torch.int32, device=device)
        self._settings = torch.zeros(rows + 1, sample_kernels.COLUMNS.value, device=device)
        self._kinds = np.zeros(rows, np.int64)  # the host's copy of the column KIND
        self._owners: list[Sequence | None] = [None] * rows
        self._entries = PenaltyEntries(rows + 1, vocab, device)
        self._cuts: _CutBuffers | None = None
        self._is_compiled = threading.Event()
        self._is_compiled.set()

    def foresees(self, seq: Sequence) -> bool:
        if not self._is_compiled.is_set():
            return False
        return not seq.params.edits_logits or self._entries.follow(seq)

    def prepare_in_background(self) -> threading.Thread:
        """Run `prepare` in a background thread; until it has ended, `special` samples with torch."""
        self._is_compiled.clear()

        def run() -> None:
            try:
                self.prepare()
            except Exception as error:  # the compiler may raise anything; torch is the fallback
                log.error("sampling kernels failed to compile: penalties and cuts run in torch, slowly", exc_info=error)
            else:
                self._is_compiled.set()

        thread = threading.Thread(target=run, name="kernels", daemon=True)
        thread.start()
        return thread

    @gc_disabled_in_all_threads()
    def prepare(self) -> None:
        """Compile the kernels of `special` ahead of their use, without launching any; callable from any thread."""
        meta = torch.device("meta")
        twin = KernelDraw(self._rows, self._vocab, meta, tile=self._tile, room=self._room)
        logits, place = torch.empty(1, self._vocab, device=meta), torch.empty(1, dtype=torch.int64, device=meta)
        number = torch.empty(1, device=meta)
        results = torch.empty(1, 2, dtype=torch.float64, device=meta)
        for top_k in (-1, 2):  # tokens are counted only for top-k
            params = SamplingParams(top_p=0.5, top_k=top_k, frequency_penalty=1.0)
            seq = Sequence("", [0], params, frozenset(), 1, notify=lambda seq: None, row=0)
            twin.special(logits, DrawBatch(place, number, number, number, place, results), [seq], [0])

    @classmethod
    @gc_disabled_in_all_threads()
    def compile_plain(cls, rows: int, vocab: int, *, tile: int = _TILE) -> None:
        """Compile the kernels of `plain`; needs no model."""
        meta = torch.device("meta")
        number, place = torch.empty(rows, device=meta), torch.empty(rows, dtype=torch.int64, device=meta)
        results = torch.empty(rows, 2, dtype=torch.float64, device=meta)
        batch = DrawBatch(place, number, number, number, place, results)
        cls(rows, vocab, meta, tile=tile).plain(torch.empty(rows, vocab, device=meta), batch)

    def plain(self, logits: torch.Tensor, batch: DrawBatch) -> None:
        self._mass(logits, batch, redraw=False)
        self._pick(logits, batch, redraw=False)

    def special(
        self, logits: torch.Tensor, batch: DrawBatch, sequences: SequenceOf[Sequence], ahead: SequenceOf[int]
    ) -> Callable[[], None] | None:
        """Sample again, after `plain`; the caller calls the returned function once the results are on the host."""
        tops = self._copy_top_logprobs(logits, batch, sequences)
        if not self._is_compiled.is_set():
            _draw_with_torch(logits, batch, sequences)
            return tops
        kinds = self._hold(sequences)
        edited = np.flatnonzero(kinds & EDITS).tolist()
        if edited:
            self._entries.hold([sequences[i] for i in edited], [ahead[i] for i in edited])
            self._entries.edit(logits, batch, self._settings)
            self._mass(logits, batch, redraw=True)
        if (kinds & CUTS).any():
            self._cut(logits, batch, counts=bool((kinds & COUNTS).any()))
        if kinds.any():
            self._pick(logits, batch, redraw=True)
        if edited:
            self._entries.note(batch, self._settings, [sequences[i] for i in edited])
        return tops

    def _hold(self, sequences: SequenceOf[Sequence]) -> np.ndarray:
        """Upload the settings of sequences that are new to their row; returns the kinds of all."""
        fresh = [seq for seq in sequences if self._owners[seq.row] is not seq]
        if fresh:
            settings = np.array([_settings(seq) for seq in fresh], np.float32)
            rows = [seq.row for seq in fresh]
            there = send(np.column_stack([np.array(rows, np.float32), settings]), self._device)
            put(self._settings, there[:, 0], there[:, 1:])
            self._kinds[rows] = settings[:, sample_kernels.KIND.value]
            for seq in fresh:
                self._owners[seq.row] = seq
        return self._kinds[[seq.row for seq in sequences]]

    def _mass(self, logits: torch.Tensor, batch: DrawBatch, *, redraw: bool) -> None:
        launch(
            sample_kernels.mass_kernel, (len(logits), self._tiles),
            logits, batch.rows, batch.temperature, batch.greedy, self._settings, self._tops, self._masses, self._best,
            self._vocab, logits.stride(0), self._tiles, self._rows, REDRAW=redraw, TILE=self._tile, num_warps=8,
        )  # fmt: skip

    def _pick(self, logits: torch.Tensor, batch: DrawBatch, *, redraw: bool) -> None:
        cuts = self._cuts
        kept = (self._masses, self._tops, self._best) if cuts is None else (cuts.kept, cuts.limit, cuts.last)
        launch(
            sample_kernels.pick_kernel, (len(logits),),
            logits, batch.rows, batch.temperature, batch.greedy, batch.uniform, self._settings, self._tops,
            self._masses, self._best, *kept, batch.tokens, batch.results, self._vocab, logits.stride(0), self._tiles,
            self._rows, REDRAW=redraw, TILE=self._tile, TP=self._padded, num_warps=8,
        )  # fmt: skip

    def _cut(self, logits: torch.Tensor, batch: DrawBatch, *, counts: bool) -> None:
        """Compute where top-k, top-p and min-p cut each row, and the mass that its tiles keep."""
        if self._cuts is None:
            self._cuts = _CutBuffers(self._rows, self._tiles, self._room, self._device)
        cuts, grid = self._cuts, (len(logits), self._tiles)
        exact = {"num_warps": 8, "enable_fp_fusion": False}  # see `top_p_kernels`
        row = (logits, batch.rows, batch.temperature, self._settings, self._tops, self._masses)
        shape = (self._vocab, logits.stride(0), self._tiles)
        for at in range(_PROBES):
            before, after = (at + 1) % 2, at % 2
            launch(
                top_p_kernels.probe_kernel, grid,
                *row, cuts.sums[before], cuts.states[before], cuts.sums[after], cuts.states[after], *shape,
                FIRST=at == 0, COUNTS=counts, TILE=self._tile, TP=self._padded, **exact,
            )  # fmt: skip
        launch(
            top_p_kernels.gather_kernel, grid,
            *row, cuts.sums[after], cuts.states[after], cuts.states[before], cuts.kept, cuts.spans, cuts.listed,
            cuts.index, *shape, COUNTS=counts, TILE=self._tile, TP=self._padded, ROOM=self._room, **exact,
        )  # fmt: skip
        launch(
            top_p_kernels.settle_kernel, (len(logits),),
            *row, cuts.states[before], cuts.kept, cuts.spans, cuts.listed, cuts.index, cuts.limit, cuts.last, *shape,
            TILE=self._tile, TP=self._padded, ROOM=self._room, BLOCK=min(_BLOCK, self._tile),
            **exact,
        )  # fmt: skip

    def _copy_top_logprobs(
        self, logits: torch.Tensor, batch: DrawBatch, sequences: SequenceOf[Sequence]
    ) -> Callable[[], None] | None:
        """Copy the most likely tokens before any edit to the host asynchronously, for sequences that request them."""
        members = [(i, seq) for i, seq in enumerate(sequences) if seq.top_logprobs]
        if not members:
            return None
        rows = send(np.array([i for i, _ in members]), self._device)
        most = max(seq.top_logprobs for _, seq in members)
        found = [logits[part].topk(most) for part in rows.split(_ROWS)]
        inverse, tops = 1 / batch.temperature[rows, None], self._tops[rows]
        best = tops.amax(1, keepdim=True)
        total = (self._masses[rows] * ((tops - best) * inverse).exp()).sum(1, keepdim=True)
        logprobs = (torch.cat([f.values for f in found]) - best) * inverse - total.log()
        values, indices = copy_to_host(logprobs), copy_to_host(torch.cat([f.indices for f in found]))

        def arrived() -> None:
            for (_, seq), value, index in zip(members, values.tolist(), indices.tolist(), strict=True):
                if seq.finish is None:
                    seq.output_top.append(list(zip(value, index, strict=True))[: seq.top_logprobs])

        return arrived


def _draw_with_torch(logits: torch.Tensor, batch: DrawBatch, sequences: SequenceOf[Sequence]) -> None:
    """Sample in torch for sequences with penalties or cuts: the same tokens and log-probs, up to rounding."""
    members = [i for i, seq in enumerate(sequences) if not seq.params.plain]
    for start in range(0, len(members), _ROWS):
        some = members[start : start + _ROWS]
        places = send(np.array(some), batch.rows.device)
        tokens, logprobs = draw_each(
            logits[places], [sequences[i] for i in some], batch.uniform[places], batch.greedy[places] != 0
        )
        batch.tokens[batch.rows[places]] = tokens
        batch.results[places] = torch.stack([tokens.double(), logprobs.double()], 1)


class _CutBuffers:
    """Buffers shared by the kernels that compute cuts."""

    def __init__(self, rows: int, tiles: int, room: int, device: torch.device) -> None:
        probes, state = top_p_kernels.PROBES.value, top_p_kernels.STATE.value
        self.sums = torch.zeros(2, rows, tiles, 2, probes, device=device)
        self.states = torch.zeros(2, rows, state, device=device)
        self.kept = torch.zeros(rows, tiles, device=device)
        self.spans = torch.zeros(rows, 3, tiles, dtype=torch.int32, device=device)
        self.listed = torch.zeros(rows, tiles, room, device=device)
        self.index = torch.zeros(rows, tiles, room, dtype=torch.int32, device=device)
        self.limit = torch.zeros(rows, device=device)
        self.last = torch.zeros(rows, dtype=torch.int32, device=device)


def _settings(seq: Sequence) -> list[float]:
    """Return a row of settings, in column order; fp32 is exact for integers up to any vocabulary size or length."""
    params = seq.params
    edits, cuts = params.edits_logits, not params.greedy_or_full_support
    return [
        EDITS * edits + CUTS * cuts + COUNTS * (cuts and params.top_k > 0),
        max(params.top_k, 0),
        params.top_p,
        -math.log(params.min_p) if params.min_p > 0 else math.inf,
        params.repetition_penalty,
        params.frequency_penalty,
        params.presence_penalty,
        params.min_new_tokens,
    ]
