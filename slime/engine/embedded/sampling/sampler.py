"""Tokens from logits on a GPU: the plain draw in the captured graph, and what only some sequences ask for after it."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
import triton

from slime.cluster.garbage_collection import collector_at_rest
from slime.engine.embedded.model.cpu_sampler import draw_each
from slime.engine.embedded.model.interface import DrawBatch
from slime.engine.embedded.sampling import sample_kernels, top_p_kernels
from slime.engine.embedded.sampling.penalties import Entries, Launch, bring, compile_only, launch, put, send
from slime.engine.embedded.sampling_params import SamplingParams
from slime.engine.embedded.scheduler import Sequence

log = logging.getLogger(__name__)

EDITS, CUTS, COUNTS = sample_kernels.EDITS.value, sample_kernels.CUTS.value, sample_kernels.COUNTS.value
_TILE, _MOST_TILES = 8192, 32
_ROOM = 256  # tokens of a tile that fit on the list of a cut
_PROBES = 3  # passes over the vocabulary before tokens are listed
_BLOCK = 2048  # tokens of a row that is read at once
_ROWS = 32  # rows that torch copies at once, to sort them or to find their most likely tokens


class KernelDraw:
    """Draws for up to `rows` sequences; table row `rows` is nobody's.

    While the kernels of `special` are being compiled (`prepare_aside`) torch draws for those who need them: slowly, and
    only behind tokens that the host has read, but nobody waits for a compiler.
    """

    def __init__(
        self, rows: int, vocab: int, device: torch.device, *, tile: int = _TILE, room: int = _ROOM, run: Launch = launch
    ) -> None:
        self._run = run
        self._rows, self._vocab, self._device = rows, vocab, device
        self._tile = max(tile, triton.next_power_of_2(triton.cdiv(vocab, _MOST_TILES)))
        self._tiles = triton.cdiv(vocab, self._tile)
        self._room = min(room, self._tile)
        self._padded = triton.next_power_of_2(self._tiles)
        self._tops, self._masses = (torch.zeros(rows, self._tiles, device=device) for _ in range(2))
        self._best = torch.zeros(rows, self._tiles, dtype=torch.int32, device=device)
        self._settings = torch.zeros(rows + 1, sample_kernels.COLUMNS.value, device=device)
        self._kinds = np.zeros(rows, np.int64)  # the host's copy of that column
        self._owners: list[Sequence | None] = [None] * rows
        self._entries = Entries(rows + 1, vocab, device, run)
        self._cuts: _Cuts | None = None
        self._is_compiled = threading.Event()
        self._is_compiled.set()

    def foresees(self, seq: Sequence) -> bool:
        if not self._is_compiled.is_set():
            return False
        return not seq.params.edits_logits or self._entries.follow(seq)

    def prepare_aside(self, compiles: Launch = compile_only) -> threading.Thread:
        """`prepare` in a thread of its own; until it has come to its end, torch does what `special` is asked for."""
        self._is_compiled.clear()

        def run() -> None:
            try:
                self.prepare(compiles)
            except Exception as error:  # whatever a compiler raises: there is another way
                log.error("torch draws with cuts and penalties, slowly: no kernels could be compiled", exc_info=error)
            else:
                self._is_compiled.set()

        thread = threading.Thread(target=run, name="kernels", daemon=True)
        thread.start()
        return thread

    @collector_at_rest()
    def prepare(self, compiles: Launch = compile_only) -> None:
        """Compile what `special` launches, so that nobody waits for that later; nothing is launched, any thread may."""
        nowhere = torch.device("meta")
        twin = KernelDraw(self._rows, self._vocab, nowhere, tile=self._tile, room=self._room, run=compiles)
        logits, place = torch.empty(1, self._vocab, device=nowhere), torch.empty(1, dtype=torch.int64, device=nowhere)
        number = torch.empty(1, device=nowhere)
        results = torch.empty(1, 2, dtype=torch.float64, device=nowhere)
        for top_k in (-1, 2):  # tokens are counted only for top-k
            params = SamplingParams(top_p=0.5, top_k=top_k, frequency_penalty=1.0)
            seq = Sequence("", [0], params, frozenset(), 1, notify=lambda seq: None, row=0)
            twin.special(logits, DrawBatch(place, number, number, number, place, results), [seq], [0])

    @classmethod
    @collector_at_rest()
    def compile_plain(cls, rows: int, vocab: int, compiles: Launch = compile_only, tile: int = _TILE) -> None:
        """Compile what `plain` launches; the model need not be there."""
        nowhere = torch.device("meta")
        number, place = torch.empty(rows, device=nowhere), torch.empty(rows, dtype=torch.int64, device=nowhere)
        results = torch.empty(rows, 2, dtype=torch.float64, device=nowhere)
        batch = DrawBatch(place, number, number, number, place, results)
        cls(rows, vocab, nowhere, tile=tile, run=compiles).plain(torch.empty(rows, vocab, device=nowhere), batch)

    def plain(self, logits: torch.Tensor, batch: DrawBatch) -> None:
        self._mass(logits, batch, redraw=False)
        self._pick(logits, batch, redraw=False)

    def special(
        self, logits: torch.Tensor, batch: DrawBatch, sequences: SequenceOf[Sequence], ahead: SequenceOf[int]
    ) -> Callable[[], None] | None:
        """After `plain`; what it returns is called once the results have arrived."""
        tops = self._bring_top(logits, batch, sequences)
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
        """See that the settings of each row are those of the sequence that has it now; their kinds."""
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
        self._run(
            sample_kernels.mass_kernel, (len(logits), self._tiles),
            logits, batch.rows, batch.temperature, batch.greedy, self._settings, self._tops, self._masses, self._best,
            self._vocab, logits.stride(0), self._tiles, self._rows, REDRAW=redraw, TILE=self._tile, num_warps=8,
        )  # fmt: skip

    def _pick(self, logits: torch.Tensor, batch: DrawBatch, *, redraw: bool) -> None:
        cuts = self._cuts
        kept = (self._masses, self._tops, self._best) if cuts is None else (cuts.kept, cuts.limit, cuts.last)
        self._run(
            sample_kernels.pick_kernel, (len(logits),),
            logits, batch.rows, batch.temperature, batch.greedy, batch.uniform, self._settings, self._tops,
            self._masses, self._best, *kept, batch.tokens, batch.results, self._vocab, logits.stride(0), self._tiles,
            self._rows, REDRAW=redraw, TILE=self._tile, TP=self._padded, num_warps=8,
        )  # fmt: skip

    def _cut(self, logits: torch.Tensor, batch: DrawBatch, *, counts: bool) -> None:
        """Leaves where each row with cuts ends, and what its tiles keep."""
        if self._cuts is None:
            self._cuts = _Cuts(self._rows, self._tiles, self._room, self._device)
        cuts, grid = self._cuts, (len(logits), self._tiles)
        exact = {"num_warps": 8, "enable_fp_fusion": False}  # see `cut_kernels`
        row = (logits, batch.rows, batch.temperature, self._settings, self._tops, self._masses)
        shape = (self._vocab, logits.stride(0), self._tiles)
        for at in range(_PROBES):
            before, after = (at + 1) % 2, at % 2
            self._run(
                top_p_kernels.probe_kernel, grid,
                *row, cuts.sums[before], cuts.states[before], cuts.sums[after], cuts.states[after], *shape,
                FIRST=at == 0, COUNTS=counts, TILE=self._tile, TP=self._padded, **exact,
            )  # fmt: skip
        self._run(
            top_p_kernels.gather_kernel, grid,
            *row, cuts.sums[after], cuts.states[after], cuts.states[before], cuts.kept, cuts.spans, cuts.listed,
            cuts.index, *shape, COUNTS=counts, TILE=self._tile, TP=self._padded, ROOM=self._room, **exact,
        )  # fmt: skip
        self._run(
            top_p_kernels.settle_kernel, (len(logits),),
            *row, cuts.states[before], cuts.kept, cuts.spans, cuts.listed, cuts.index, cuts.limit, cuts.last, *shape,
            TILE=self._tile, TP=self._padded, ROOM=self._room, BLOCK=min(_BLOCK, self._tile),
            **exact,
        )  # fmt: skip

    def _bring_top(
        self, logits: torch.Tensor, batch: DrawBatch, sequences: SequenceOf[Sequence]
    ) -> Callable[[], None] | None:
        """The most likely tokens before any edit, for those who asked: to the host, without waiting."""
        asking = [(i, seq) for i, seq in enumerate(sequences) if seq.top_logprobs]
        if not asking:
            return None
        rows = send(np.array([i for i, _ in asking]), self._device)
        most = max(seq.top_logprobs for _, seq in asking)
        found = [logits[part].topk(most) for part in rows.split(_ROWS)]
        inverse, tops = 1 / batch.temperature[rows, None], self._tops[rows]
        best = tops.amax(1, keepdim=True)
        total = (self._masses[rows] * ((tops - best) * inverse).exp()).sum(1, keepdim=True)
        logprobs = (torch.cat([f.values for f in found]) - best) * inverse - total.log()
        values, indices = bring(logprobs), bring(torch.cat([f.indices for f in found]))

        def arrived() -> None:
            for (_, seq), value, index in zip(asking, values.tolist(), indices.tolist(), strict=True):
                if seq.finish is None:
                    seq.output_top.append(list(zip(value, index, strict=True))[: seq.top_logprobs])

        return arrived


def _draw_with_torch(logits: torch.Tensor, batch: DrawBatch, sequences: SequenceOf[Sequence]) -> None:
    """The same tokens and log-probs, up to rounding, for those who ask for more than temperature."""
    asking = [i for i, seq in enumerate(sequences) if not seq.params.plain]
    for start in range(0, len(asking), _ROWS):
        some = asking[start : start + _ROWS]
        places = send(np.array(some), batch.rows.device)
        tokens, logprobs = draw_each(
            logits[places], [sequences[i] for i in some], batch.uniform[places], batch.greedy[places] != 0
        )
        batch.tokens[batch.rows[places]] = tokens
        batch.results[places] = torch.stack([tokens.double(), logprobs.double()], 1)


class _Cuts:
    """What the kernels of a cut leave for one another."""

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
    """In the order of the columns; whole numbers beyond fp32's are beyond every vocabulary and length as well."""
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
