"""The engine's thread: takes requests and commands between steps, steps the model, tells the waiters.

Invariant: scheduler, cache and model are touched by this thread only; other threads hand in work through `submit` and
`call`. A step that raises ends the engine: `on_death` gets the exception and every waiter an abort.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from slime.cluster.precision import choose_dtype, slow_dtype_note
from slime.engine.embedded.cache import KVCache
from slime.engine.embedded.model.runner import Decoder, ModelRunner, Sampled
from slime.engine.embedded.options import EngineOptions
from slime.engine.embedded.sampling_params import BadRequest
from slime.engine.embedded.scheduler import Extend, Scheduler
from slime.engine.embedded.sequence import Sequence
from slime.engine.embedded.weights import loading
from slime.engine.embedded.weights.groups import Announced, WeightGroups
from slime.engine.embedded.weights.views import FolderViews
from slime.models.delta.folder import BadDelta, DeltaIndex, read_index
from slime.models.loading import load_causal_lm
from slime.models.shape import count_parameters

log = logging.getLogger(__name__)

T = TypeVar("T")

PAUSE_MODES = ("abort", "in_place", "retract")
_CPU_KV_BYTES = 2 << 30


@dataclass
class Counters:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    requests: int = 0
    steps: int = 0
    busy_seconds: float = 0.0


@dataclass
class Flight:
    """A decode step that was launched and not read yet."""

    running: list[Sequence]
    slots: np.ndarray
    launched: Any


class EngineCore:
    def __init__(self, options: EngineOptions, *, on_death: Callable[[BaseException], object]) -> None:
        self.options = options
        self.counters = Counters()
        self.weight_version = options.weight_version
        self.paused = False
        self.stale: str | None = None
        self.groups = WeightGroups()
        self._unfinished: str | None = None
        self._released: set[str] = set()
        self._flight: Flight | None = None
        self._on_death = on_death
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = False
        self._thread: threading.Thread | None = None

    # loading

    def load(self, device: str) -> None:
        """Load the model and make room for keys and values; slow, called once before `start`."""
        o = self.options
        name, reason = choose_dtype(o.dtype, device, count_parameters(o.model_path))
        log.info("computing in %s on %s: %s", name, device, reason)
        note = slow_dtype_note("--dtype", o.dtype, device)
        if note is not None:
            log.warning(note)
        model = load_causal_lm(
            o.model_path,
            dtype=getattr(torch, name),
            device=device,
            attn_implementation="eager",
            trust_remote_code=o.trust_remote_code,
        )
        text_config = model.config.get_text_config()
        self.vocab_size: int = text_config.vocab_size
        longest = o.context_length or text_config.max_position_embeddings
        self.context_len = min(longest, o.max_total_tokens or longest)
        probe = KVCache(0)
        self.scheduler = Scheduler(
            probe, max_running=o.max_running_requests, context_len=self.context_len, chunk=o.chunked_prefill_size
        )
        self.runner = ModelRunner(model, self.scheduler.table)
        self.views = FolderViews(model)
        self.capacity = o.max_total_tokens or self._affordable_slots()
        self.context_len = min(self.context_len, self.capacity)
        self.scheduler.cache = KVCache(self.capacity, share_prefixes=o.share_prefixes)
        self.runner.allocate_kv(self.capacity)
        self.decoder: Decoder = self.runner
        if self.runner.cuda:
            self._prepare_cuda()

    def _affordable_slots(self) -> int:
        if self.runner.cuda:
            budget = int(torch.cuda.mem_get_info()[0] * self.options.mem_fraction)
        else:
            budget = int(min(_CPU_KV_BYTES, _available_ram() * self.options.mem_fraction))
        wanted = self.options.max_running_requests * self.context_len
        return max(1, min(wanted, budget // self.runner.kv_bytes_per_token()))

    def _prepare_cuda(self) -> None:
        from slime.engine.embedded.model.cuda import CudaDecoder

        compile_model = self.options.compile is not False
        if compile_model:
            log.info("compiling the decode step: this takes about a minute (--no-compile skips it)")
        decoder = CudaDecoder(
            self.runner,
            max_running=self.options.max_running_requests,
            compile_model=compile_model,
        )
        decoder.capture()
        self.decoder = decoder

    # the outside

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._inbox.put(self._set_stopping)
        if self._thread is not None:
            self._thread.join(timeout=30)

    def submit(self, sequences: list[Sequence]) -> None:
        self._inbox.put(lambda: self._accept(sequences))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` in the engine's thread between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BadRequest as refused:
                future.set_exception(refused)

        self._inbox.put(run)
        return future

    # the thread

    def _set_stopping(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        try:
            while not self._stopping:
                if self._flight is not None and (self.paused or self.scheduler.idle or not self._inbox.empty()):
                    self._land(self._flight)  # commands and newcomers meet a quiet engine
                self._take_work(wait=self.paused or self.scheduler.idle)
                if not self.paused and not self.scheduler.idle:
                    started = time.perf_counter()
                    self._step()
                    self.counters.busy_seconds += time.perf_counter() - started
        except BaseException as error:
            log.exception("the engine's thread died")
            self._on_death(error)
            raise
        finally:
            self.abort_all("the engine stopped")

    def _take_work(self, *, wait: bool) -> None:
        if wait:
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()

    def _accept(self, sequences: list[Sequence]) -> None:
        self.counters.requests += len(sequences)
        self.scheduler.waiting.extend(sequences)

    def _step(self) -> None:
        self.counters.steps += 1
        extends = self.scheduler.next_extends(self.weight_version) if self._flight is None else []
        if extends:
            self._extend(extends)
        elif self.scheduler.running or self._flight is not None:
            self._decode()
        else:  # half-computed prompts block one another: the youngest makes room
            self.scheduler.retract(self.scheduler.prefilling[-1])

    def _extend(self, extends: list[Extend]) -> None:
        sampled = self.runner.extend(extends)
        complete = [e.sequence for e in extends if e.end == e.sequence.length]
        for seq in complete:
            self.counters.prompt_tokens += len(seq.prompt_ids)
            self.counters.cached_tokens += seq.cached_tokens
            self.scheduler.prefilled(seq)
            if seq.max_new_tokens == 0:
                seq.end({"type": "length", "length": 0})
                self._leave(seq)
        self._take_tokens([s for s in complete if s.max_new_tokens > 0], sampled)

    def _decode(self) -> None:
        """One token for every running sequence; the next step is launched first where nothing stands in its way."""
        flight = self._flight or self._take_off()
        if flight is None:
            return
        following = self._follow(flight) if self._may_follow(flight) else None
        self._land(flight)
        self._flight = following

    def _take_off(self) -> Flight | None:
        slots = self.scheduler.next_decode()
        running = list(self.scheduler.running)
        return Flight(running, slots, self.decoder.launch(running, slots, None)) if slots is not None else None

    def _may_follow(self, flight: Flight) -> bool:
        """Nobody is waiting, nobody's length ends with this step, and drawing needs nothing that is still unread."""
        s = self.scheduler
        if not self.decoder.looks_ahead or s.waiting or s.prefilling or not self._inbox.empty():
            return False
        return all(q.plain and len(q.output_ids) + 1 < q.max_new_tokens and q.finish is None for q in flight.running)

    def _follow(self, flight: Flight) -> Flight | None:
        slots = self.scheduler.cache.take(len(flight.running))
        if slots is None:
            return None
        return Flight(flight.running, slots, self.decoder.launch(flight.running, slots, flight.launched))

    def _land(self, flight: Flight) -> None:
        """Read a step's tokens; a sequence that finished meanwhile has one too many, which is forgotten."""
        self._flight = None
        tokens, logprobs = self.decoder.collect(flight.launched)
        gone = [i for i, seq in enumerate(flight.running) if seq.finish is not None]
        if gone:
            self.scheduler.cache.release(flight.slots[gone])
        alive = [step for step in zip(flight.running, tokens, logprobs, strict=True) if step[0].finish is None]
        for seq, _, _ in alive:
            seq.computed += 1
        self._take_tokens([s for s, _, _ in alive], ([t for _, t, _ in alive], [lp for _, _, lp in alive]))

    def _take_tokens(self, sequences: list[Sequence], sampled: Sampled) -> None:
        self.counters.generated_tokens += len(sequences)
        version = self.weight_version
        for seq, token, logprob in zip(sequences, *sampled, strict=True):
            seq.append(token, logprob, version)
            if seq.finish is not None:
                self._leave(seq)
            elif seq.stream:
                seq.notify(seq)

    def _leave(self, seq: Sequence) -> None:
        self.scheduler.drop(seq, version=self.weight_version)
        seq.notify(seq)

    # commands, run through `call`

    def abort(self, rid: str, reason: str = "aborted by request") -> int:
        """Abort the request whose id is `rid`, all of its samples; returns how many sequences that were."""
        hit = [s for s in self.scheduler.all() if s.rid == rid]
        for seq in hit:
            self._abort(seq, reason)
        return len(hit)

    def abort_all(self, reason: str = "aborted by request") -> int:
        everyone = self.scheduler.all()
        for seq in everyone:
            self._abort(seq, reason)
        return len(everyone)

    def _abort(self, seq: Sequence, reason: str) -> None:
        seq.end({"type": "abort", "message": reason})
        self._leave(seq)

    def pause(self, mode: str) -> None:
        if mode not in PAUSE_MODES:
            raise BadRequest(f"pause mode must be one of {', '.join(PAUSE_MODES)}, not {mode!r}")
        if mode == "abort":
            self.abort_all("generation was paused")
        if mode == "retract":
            for seq in reversed([*self.scheduler.running, *self.scheduler.prefilling]):
                self.scheduler.retract(seq)
        self.paused = True

    def resume(self) -> None:
        if self._unfinished is not None:
            self.mark_stale(self._unfinished)
        self._unfinished = None
        self.paused = False

    def flush_cache(self) -> None:
        self.scheduler.cache.tree.clear()

    def mark_stale(self, reason: str) -> None:
        """Refuse to generate until whole weights come: what is loaded is not what anybody published."""
        log.error("the weights are stale: %s", reason)
        self.stale = reason
        self.abort_all(f"the weights are stale: {reason}")

    def update_weights(
        self,
        load: Callable[[], int],
        version: str | None,
        *,
        flush: bool,
        bucket: str | None = None,
        whole: bool = True,
    ) -> int:
        """Apply `load` and take the new version; slots of running sequences now mix two sets of weights.

        No prefix that earlier weights computed is shared from now on, whatever `flush` says of an update that goes on.
        `bucket` names what was loaded of an update that goes on; `whole` weights make good whatever was wrong before.
        """
        if "weights" in self._released:
            raise BadRequest("the weights are released: call /resume_memory_occupation first")
        try:
            copied = load()
        finally:
            self.runner.weights_changed()
        self._unfinished = bucket
        if flush or bucket is None:
            self.flush_cache()
        for seq in [*self.scheduler.running, *self.scheduler.prefilling]:
            seq.kv_version = None
        if bucket is None and whole:
            self.stale = None
        if bucket is None and version is not None:
            self.weight_version = version
        return copied

    def update_from_files(self, paths: list[str], version: str | None, *, flush: bool) -> int:
        folder = self.options.model_path
        return self.update_weights(
            lambda: loading.load_from_files(self.views, paths, config_folder=folder), version, flush=flush
        )

    def update_from_bytes(self, body: bytes, version: str | None, *, flush: bool) -> int:
        return self.update_weights(lambda: loading.load_from_bytes(self.views, body), version, flush=flush, whole=False)

    def update_from_folder(self, folder: str, version: str | None, *, flush: bool) -> int:
        """A model folder, or a version folder with a delta to the weights that are here now."""
        try:
            index = read_index(Path(folder))
        except BadDelta as cause:
            raise BadRequest(str(cause)) from cause
        if index is not None:
            return self._update_from_delta(Path(folder), index, flush=flush)
        trust = self.options.trust_remote_code
        return self.update_weights(
            lambda: loading.load_from_folder(self.views, folder, trust_remote_code=trust), version, flush=flush
        )

    def _update_from_delta(self, folder: Path, index: DeltaIndex, *, flush: bool) -> int:
        if self.stale is not None or self._unfinished is not None:
            raise loading.Conflict(f"a delta needs whole weights to apply to: {self.stale or self._unfinished}")
        base = self.weight_version
        try:
            return self.update_weights(
                lambda: loading.load_from_delta(self.views, folder, index, version=base),
                str(index.version),
                flush=flush,
            )
        except loading.DifferentWeights as cause:
            self.mark_stale(str(cause))
            raise

    def update_from_group(self, bucket: Announced, version: str | None, *, flush: bool) -> int:
        """One bucket of a broadcast; the version is taken with the last."""
        source = f"group {bucket.group_name}"
        loading.check_shapes(self.views, dict(zip(bucket.names, bucket.shapes, strict=True)), source)

        def load() -> int:
            return loading.load_tensors(self.views, self.groups.receive(bucket, self.runner.device), source)

        left = None if bucket.is_last else f"only {bucket.number} of {bucket.count} buckets of version {version} came"
        return self.update_weights(load, version, flush=flush, bucket=left)

    def check_weights(self, action: str) -> dict[str, Any]:
        """`checksum`: xxh3-128 of every tensor; `shapes`: what an update may name."""
        if action == "shapes":
            return {"shapes": {name: list(tensor.shape) for name, tensor in self.views.readable().items()}}
        if action != "checksum":
            raise BadRequest(f"action must be checksum or shapes, not {action!r}")
        from slime.models.delta.tensors import tensor_checksums  # zstandard, xxhash

        return {"checksums": tensor_checksums(self.views.readable().items())}

    def release_memory(self, tags: list[str]) -> None:
        """Give device memory back: the KV cache is dropped, weights move to the host (CUDA graphs go with either)."""
        if not self.scheduler.idle:
            raise BadRequest(
                f"{len(self.scheduler.all())} requests are running: abort them or wait before releasing memory"
            )
        for tag in tags:
            if tag == "kv_cache" and tag not in self._released:
                self.flush_cache()
                self.runner.context.free()
            elif tag == "weights" and tag not in self._released and self.runner.cuda:
                self.runner.model.to("cpu")
            self._released.add(tag)
        self.paused = True
        if self.runner.cuda:
            self.decoder = self.runner
            torch.cuda.empty_cache()

    def resume_memory(self, tags: list[str]) -> None:
        for tag in tags:
            if tag not in self._released:
                continue
            if tag == "weights" and self.runner.cuda:
                self.runner.model.to(self.runner.device)
            elif tag == "kv_cache":
                self.runner.allocate_kv(self.capacity)
            self._released.discard(tag)
        if not self._released:
            if self.runner.cuda:
                self._prepare_cuda()
            self.paused = False

    def info(self) -> dict[str, Any]:
        s, c = self.scheduler, self.counters
        return {
            "weight_version": self.weight_version,
            "context_length": self.context_len,
            "max_total_num_tokens": self.capacity,
            "max_running_requests": s.max_running,
            "num_running_reqs": len(s.running) + len(s.prefilling),
            "num_waiting_reqs": len(s.waiting),
            "num_used_tokens": self.capacity - s.cache.pool.free - s.cache.tree.held,
            "num_cached_tokens": s.cache.tree.held,
            "paused": self.paused,
            "stale": self.stale,
            "released": sorted(self._released),
            "totals": vars(c).copy(),
        }


def _available_ram() -> int:
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024
    return _CPU_KV_BYTES
