"""A model that is ready to be stepped: loaded, with room for keys and values, and tried.

Invariant: what `load` leaves computes what the model's plain forward does (`model/check.py`). Fused kernels that do not
are given up for transformers' own code; a model that neither computes is refused.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from slime.cluster.devices import choose_dtype, slow_dtype_note
from slime.cluster.memory.cuda_driver import CudaRefused
from slime.engine.embedded.bodies import make_body
from slime.engine.embedded.cache import KVCache
from slime.engine.embedded.capacity import affordable_slots
from slime.engine.embedded.loaded_model import LoadedModel, PlainFolder, through_transformers
from slime.engine.embedded.memory import EngineMemory
from slime.engine.embedded.model.check import (
    PlainNumbers,
    WrongNumbers,
    check_small_of,
    exact_until,
    prompt_lengths,
    refusing,
)
from slime.engine.embedded.options import EngineOptions
from slime.engine.embedded.scheduler import Scheduler
from slime.engine.embedded.steps import Counters, Steps
from slime.errors import UserError
from slime.models.shape import count_parameters

if TYPE_CHECKING:  # with Triton, which only a GPU needs
    from slime.engine.embedded.sampling.draw import KernelDraw

log = logging.getLogger(__name__)


class LoadedEngine:
    """Model, scheduler and steps of one engine; `load` makes all of them."""

    memory: EngineMemory | None
    vocab_size: int
    context_len: int
    capacity: int

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self.counters = Counters()
        self.phases: dict[str, float] = {}  # seconds

    @property
    def weight_version(self) -> str:
        return self.steps.version

    def load(self, device: str) -> None:
        """Load the model and make room for keys and values; slow, called once."""
        o = self.options
        name, reason = choose_dtype(o.dtype, device, count_parameters(o.model_path))
        log.info("computing in %s on %s: %s", name, device, reason)
        note = slow_dtype_note("--dtype", o.dtype, device)
        if note is not None:
            log.warning(note)
        dtype = getattr(torch, name)
        plain = None
        if device == "cuda" and o.fused_kernels:
            plain = PlainFolder.at(o.model_path, trust_remote_code=o.trust_remote_code)
        with self._phase("device"):
            self.memory = EngineMemory.on(torch.device(device))
        compiling = [] if plain is None else self._compile(plain, dtype)  # the device is there for all threads now
        with self._phase("weights"):
            if plain is not None and self.memory is not None:
                model = plain.read(dtype, self.memory)
            else:
                model = self._through_transformers(device, dtype, fused_kernels=o.fused_kernels)
        try:
            self._make_ready(model, compiling)
        except WrongNumbers as wrong:
            if self.model.block is None:
                raise
            log.error("the fused kernels are not used, transformers' own code computes the model: %s", wrong)
            if self.memory is not None:
                self.memory.release_weights(keep=False)
                self.memory.release_cache()
                self.memory = EngineMemory.on(torch.device(device))
            self._make_ready(self._through_transformers(device, dtype, fused_kernels=False))

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.phases[name] = self.phases.get(name, 0.0) + time.perf_counter() - began

    def _compile(self, folder: PlainFolder, dtype: torch.dtype) -> list[threading.Thread]:
        """Compile the kernels of the model while its weights are read; whoever uses one first compiles it otherwise."""
        from slime.engine.embedded.fused.compiling import compile_kernels
        from slime.engine.embedded.sampling.draw import KernelDraw

        o = self.options
        most, positions = o.max_running_requests, min(self._longest(folder.facts), o.max_total_tokens or sys.maxsize)

        def run(compiles: Callable[[], None]) -> None:
            try:
                compiles()
            except Exception as error:
                log.warning("kernels could not be compiled ahead: %s", error, exc_info=error)

        jobs: list[Callable[[], None]] = [
            lambda: compile_kernels(folder.block, dtype, most=most, positions=positions),
            lambda: KernelDraw.compile_plain(most, folder.block.vocab),
        ]
        threads = [threading.Thread(target=run, args=(job,), name="compile", daemon=True) for job in jobs]
        for thread in threads:
            thread.start()
        return threads

    def _through_transformers(self, device: str, dtype: torch.dtype, *, fused_kernels: bool) -> LoadedModel:
        return through_transformers(
            self.options.model_path,
            dtype=dtype,
            device=device,
            memory=self.memory,
            trust_remote_code=self.options.trust_remote_code,
            fused_kernels=fused_kernels,
        )

    def _make_ready(self, model: LoadedModel, compiling: Iterable[threading.Thread] = ()) -> None:
        o, self.model, facts = self.options, model, model.facts
        self.vocab_size = facts["vocab_size"]
        longest = self._longest(facts)
        self.context_len = min(longest, o.max_total_tokens or longest)
        first = next(model.weights.parameters())
        with self._phase("plain forward"):
            plain = PlainNumbers(
                model.logits,
                model_type=facts["model_type"],
                vocab_size=self.vocab_size,
                dtype=first.dtype,
                device=first.device,
                context_len=self.context_len,
                lengths=prompt_lengths(facts, is_fused=model.block is not None),
            )
        if model.block is None:  # through transformers
            with self._phase("small model"):
                check_small_of(model.weights)
        self.scheduler = Scheduler(
            KVCache(0), max_running=o.max_running_requests, context_len=self.context_len, chunk=o.chunked_prefill_size
        )
        with refusing(facts["model_type"]):
            self.runner = model.runner(self.scheduler.table)
        self.capacity = o.max_total_tokens or affordable_slots(self.runner, o, facts, self.context_len)
        self.context_len = min(self.context_len, self.capacity)
        self.scheduler.cache = self._fresh_cache()
        with self._phase("KV cache"):
            self._allocate_cache(plain.slots)
        self.steps = Steps(
            self.scheduler, self.runner, self.counters, version=o.weight_version, fresh_cache=self._fresh_cache
        )
        with self._phase("kernels"):
            for thread in compiling:
                thread.join()
        draw = None
        if self.runner.cuda:
            with self._phase("graphs"):
                draw = self._prepare_cuda()
        with self._phase("check"):
            plain.compare(self.runner, self.steps.decoder, self.scheduler.table)
        if draw is not None:
            draw.prepare_aside()  # now that nothing else waits for the interpreter

    def _allocate_cache(self, least: int) -> None:
        """Room for the cache's tokens, and for `least` that the check at the start writes to."""
        slots = max(self.capacity, least)
        try:
            self.runner.allocate_kv(slots, None if self.memory is None else self.memory.zeros)
        except (CudaRefused, torch.cuda.OutOfMemoryError) as error:
            wanted, free = slots * self.runner.kv_bytes_per_token(), torch.cuda.mem_get_info()[0]
            raise UserError(
                f"a KV cache of {slots} tokens takes {wanted / 2**30:.1f} GiB, and {free / 2**30:.1f} are free on this "
                "GPU: lower --max-total-tokens (--engine-max-total-tokens in a run), or free memory on it"
            ) from error

    def _longest(self, facts: Mapping[str, Any]) -> int:
        """The longest sequence that the model and the options allow."""
        asked, ends = self.options.context_length, exact_until(facts)
        longest: int = asked or facts["max_position_embeddings"]
        if ends is None or longest <= ends[0]:
            return longest
        limit, what = ends
        reason = f"this {facts['model_type']} model {what} in sequences above {limit} tokens"
        if asked is not None:
            raise UserError(f"{reason}: set --context-length to {limit} at most, or serve it with SGLang")
        log.warning("%s: the context ends there", reason)
        return limit

    def _fresh_cache(self) -> KVCache:
        shares = self.options.share_prefixes and not self.runner.states  # a state cannot be cut at a prefix
        return KVCache(self.capacity, share_prefixes=shares)

    def _prepare_cuda(self) -> KernelDraw:
        """Bodies and graphs; what draws from their logits, with the kernels of plain draws alone."""
        from slime.engine.embedded.model.cuda import CudaDecoder
        from slime.engine.embedded.sampling.draw import KernelDraw

        o = self.options
        body = make_body(
            self.runner,
            self.model.block,
            most=o.max_running_requests,
            positions=self.context_len,
            owned=self.memory is not None,
            compile_layers=o.compile is not False,
        )
        draw = KernelDraw(o.max_running_requests, self.vocab_size, self.runner.device)
        decoder = CudaDecoder(self.runner, body, draw, max_running=o.max_running_requests)
        decoder.capture()
        self.steps.decoder = decoder
        return draw
