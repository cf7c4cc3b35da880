"""Loads a model, allocates its KV cache, prepares the code that computes it, and verifies that code.

A model that the fused kernels compute is read straight from its folder (`PlainFolder`), without transformers, whose
import takes longer than the rest of a start. Every other model is loaded by transformers (`through_transformers`), and
so is every folder with something unusual or invalid, so that its errors are reported there. Both give the same weights,
rounded alike, and the same config fields.

Invariant: after `load` the engine computes what the model's plain forward does (`model/self_test.py`). Fused kernels
that do not are replaced by transformers' own code; a model that neither computes correctly is refused.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from slime.cluster.devices import choose_dtype, slow_dtype_note
from slime.cluster.memory.cuda_driver import CudaDriverError
from slime.engine.embedded.executor import StepExecutor
from slime.engine.embedded.fused.reference import ReferenceModel
from slime.engine.embedded.fused.rope import NotFused
from slime.engine.embedded.fused.runner import FusedRunner
from slime.engine.embedded.fused.supported_models import (
    EMBEDDING,
    FusedModelSpec,
    block_of,
    tensor_shapes,
    together,
)
from slime.engine.embedded.kv_cache import KVCache
from slime.engine.embedded.memory import EngineMemory, affordable_slots, make_contiguous
from slime.engine.embedded.model.runner import ModelRunner
from slime.engine.embedded.model.self_test import (
    NumericsMismatch,
    PlainForward,
    check_small_variant,
    eager_logits,
    exact_length_limit,
    refuse_model_errors,
)
from slime.engine.embedded.options import EngineOptions
from slime.engine.embedded.scheduler import Scheduler
from slime.engine.embedded.weights.folder import list_folder_tensors, read_into
from slime.engine.embedded.weights.parameter_views import FolderViews
from slime.errors import UserError
from slime.models.folder import SAME_CODE, check_tokenizer_fits, quantization, read_config_json
from slime.models.safetensors_io import StoredTensor
from slime.models.shape import count_parameters
from slime.storage.json_types import JsonMapping

if TYPE_CHECKING:
    from slime.engine.embedded.model.interface import DeviceModel
    from slime.engine.embedded.sampling.sampler import KernelDraw

log = logging.getLogger(__name__)

_DEFAULT_EOS_IDS = {"llama": 2, "mistral": 2}
"""EOS token ids that transformers assumes where config.json names none, by model type."""


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model: weights under the folder's names, its config, its EOS tokens, and what computes it."""

    weights: nn.Module
    facts: JsonMapping  # config.json, its part about text
    block: FusedModelSpec | None  # for the fused kernels; None: transformers' modules compute the model
    views: FolderViews
    eos_ids: frozenset[int]
    logits: Callable[[torch.Tensor], torch.Tensor]  # `[B, T, V]` of tokens, in plain operations
    runner: Callable[[np.ndarray], ModelRunner]  # for a table of slots


class NamedWeights(nn.Module):
    """Parameters under the names of a model folder, without code that computes with them."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        made: dict[int, nn.Parameter] = {}
        for name, tensor in tensors.items():
            *path, last = name.split(".")
            module: nn.Module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            parameter = made.setdefault(id(tensor), nn.Parameter(tensor, requires_grad=False))
            module.register_parameter(last, parameter)


@dataclass(frozen=True)
class PlainFolder:
    """A folder with a model for the fused kernels, which can be read without transformers."""

    path: str
    facts: JsonMapping
    block: FusedModelSpec
    stored: Mapping[str, StoredTensor]

    @classmethod
    def at(cls, path: str, *, trust_remote_code: bool) -> PlainFolder | None:
        """Describe the folder at `path`; None if transformers has to load the model."""
        facts = read_config_json(path)
        runs_own_code = trust_remote_code and "auto_map" in facts and facts.get("model_type") not in SAME_CODE
        is_unusual = runs_own_code or quantization(dict(facts)) or "text_config" in facts
        block: FusedModelSpec | None = None
        if not is_unusual and isinstance(facts.get("max_position_embeddings"), int):
            with suppress(NotFused, KeyError, TypeError, ValueError):
                block = block_of(facts)
        stored = list_folder_tensors(Path(path))
        if block is None or stored is None:
            return None
        if any(name not in stored or stored[name].shape != shape for name, shape in tensor_shapes(block).items()):
            return None
        return cls(path, facts, block, stored)

    def read(self, dtype: torch.dtype, memory: EngineMemory) -> LoadedModel:
        """Read the model into memory of the engine."""
        block = self.block
        check_tokenizer_fits(self.path, block.vocab)
        tensors = memory.place(tensor_shapes(block), dtype, together(block))
        read_into(tensors, self.stored)
        if block.tied:
            tensors["lm_head.weight"] = tensors[EMBEDDING]
        weights = NamedWeights(tensors)
        ends = parse_token_ids(self.facts.get("eos_token_id", _DEFAULT_EOS_IDS.get(str(self.facts.get("model_type")))))
        file = Path(self.path) / "generation_config.json"
        if file.is_file():
            given = json.loads(file.read_text())
            ends |= parse_token_ids(given.get("eos_token_id") if isinstance(given, dict) else None)
        return LoadedModel(
            weights,
            self.facts,
            block,
            FolderViews(weights, read_directly=True),
            ends,
            lambda ids: ReferenceModel(block, weights.state_dict()).logits(ids),
            lambda table: FusedRunner(weights, block, table),
        )


def parse_token_ids(value: object) -> frozenset[int]:
    """Parse token ids that a config gives as one id, as a list, or not at all."""
    if value is None:
        return frozenset()
    return frozenset(value) if isinstance(value, list | tuple) else frozenset({int(value)})  # type: ignore[call-overload]


def through_transformers(
    options: EngineOptions, device: str, dtype: torch.dtype, memory: EngineMemory | None, *, fused_kernels: bool
) -> LoadedModel:
    """Load any model that transformers supports."""
    from transformers.utils.logging import disable_progress_bar

    from slime.models.loading import load_causal_lm

    disable_progress_bar()
    model = load_causal_lm(
        options.model_path,
        dtype=dtype,
        device="cpu" if memory is not None else device,
        attn_implementation="eager",
        trust_remote_code=options.trust_remote_code,
    )
    facts = model.config.get_text_config().to_dict()
    block = None
    if device == "cuda" and fused_kernels:
        try:
            found = block_of(facts)
            own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
            if any(own.get(name) != shape for name, shape in tensor_shapes(found).items()):
                raise NotFused("its weights do not have the names and shapes of its model type")
            block = found
        except NotFused as reason:
            log.info("transformers' own code computes this model, not the fused kernels: %s", reason)
    if memory is not None:
        memory.adopt(model, () if block is None else together(block))
        model.to(device)  # the buffers; the parameters are there already
    ends = parse_token_ids(facts.get("eos_token_id")) | parse_token_ids(
        getattr(model.generation_config, "eos_token_id", None)
    )
    return LoadedModel(
        model,
        facts,
        block,
        FolderViews(model),
        ends,
        partial(eager_logits, model),
        lambda table: ModelRunner(model, table),
    )


class LoadedEngine:
    """The model of an engine with its KV cache, its scheduler and the executor of its steps, checked and ready.

    Loading is slow; `phases` has the seconds of its parts.
    """

    def __init__(self, options: EngineOptions, device: str) -> None:
        self._options, o = options, options
        self.phases: dict[str, float] = {}
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
        compiling = [] if plain is None else self._compile_ahead(plain, dtype)  # after the device was initialised
        with self._phase("weights"):
            if plain is not None and self.memory is not None:
                model = plain.read(dtype, self.memory)
            else:
                model = through_transformers(o, device, dtype, self.memory, fused_kernels=o.fused_kernels)
        try:
            self._make_ready(model, compiling)
        except NumericsMismatch as wrong:
            if model.block is None:
                raise
            log.error("transformers' own code computes the model, since the fused kernels failed a check: %s", wrong)
            if self.memory is not None:
                self.memory.release_weights(keep=False)
                self.memory.release_cache()
                self.memory = EngineMemory.on(torch.device(device))
            self._make_ready(through_transformers(o, device, dtype, self.memory, fused_kernels=False))

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.phases[name] = self.phases.get(name, 0.0) + time.perf_counter() - began

    def _compile_ahead(self, folder: PlainFolder, dtype: torch.dtype) -> list[threading.Thread]:
        """Start threads that compile the model's kernels while its weights are read, not when they are first used."""
        from slime.engine.embedded.fused.model import compile_kernels
        from slime.engine.embedded.sampling.sampler import KernelDraw

        o = self._options
        most, positions = (
            o.max_running_requests,
            min(longest_sequence(o, folder.facts), o.max_total_tokens or sys.maxsize),
        )

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

    def _make_ready(self, model: LoadedModel, compiling: Iterable[threading.Thread] = ()) -> None:
        """Allocate the KV cache, prepare the code that computes the model, and compare it with a plain forward."""
        o, self.model, facts = self._options, model, model.facts
        self.vocab_size: int = facts["vocab_size"]
        longest = longest_sequence(o, facts)
        self.context_len = min(longest, o.max_total_tokens or longest)
        with self._phase("plain forward"):
            weight, is_fused = next(model.weights.parameters()), model.block is not None
            plain = PlainForward(model.logits, facts, weight, context_len=self.context_len, is_fused=is_fused)
        if model.block is None:  # through transformers
            with self._phase("small model"):
                check_small_variant(model.weights)
        self.scheduler = Scheduler(
            KVCache(0), max_running=o.max_running_requests, context_len=self.context_len, chunk=o.chunked_prefill_size
        )
        with refuse_model_errors(facts["model_type"]):
            self.runner = model.runner(self.scheduler.table)
        self.capacity = o.max_total_tokens or affordable_slots(self.runner, o, facts, self.context_len)
        self.context_len = min(self.context_len, self.capacity)
        shares = o.share_prefixes and not self.runner.states  # recurrent states cannot be split at a prefix
        self.scheduler.cache = KVCache(self.capacity, share_prefixes=shares)
        with self._phase("KV cache"):
            allocate_cache(self.runner, self.memory, max(self.capacity, plain.slots))
        self.steps = StepExecutor(self.scheduler, self.runner, version=o.weight_version)
        with self._phase("kernels"):
            for thread in compiling:
                thread.join()
        draw = None
        if self.runner.cuda:
            with self._phase("graphs"):
                draw = self.prepare_cuda()
        with self._phase("check"):
            plain.compare(self.runner, self.steps.decoder, self.scheduler.table)
        if draw is not None:
            draw.prepare_in_background()  # last, when nothing else needs the interpreter

    def prepare_cuda(self) -> KernelDraw:
        """Prepare the model's body and capture CUDA graphs; returns the sampler, with kernels for plain draws only."""
        from slime.engine.embedded.model.cuda_graphs import CudaDecoder
        from slime.engine.embedded.model.interface import TransformersModel
        from slime.engine.embedded.sampling.sampler import KernelDraw

        o, runner, block = self._options, self.runner, self.model.block
        most = o.max_running_requests
        body: DeviceModel
        if block is None:
            if o.compile is not False:
                log.info("compiling the decoder layers: this takes a few seconds (--no-compile skips it)")
            body = TransformersModel(runner, compile_layers=o.compile is not False)
        else:
            from slime.engine.embedded.fused.model import FusedModel

            if self.memory is None:  # in the engine's own memory the weights of one product are contiguous already
                make_contiguous(runner.model, together(block))
            tensors, context = runner.model.state_dict(), runner.context
            body = FusedModel(block, tensors, context, most=most, positions=self.context_len, routed=runner.experts)
        draw = KernelDraw(most, self.vocab_size, runner.device)
        decoder = CudaDecoder(runner, body, draw, max_running=most)
        decoder.capture()
        self.steps.decoder = decoder
        return draw


def longest_sequence(options: EngineOptions, facts: JsonMapping) -> int:
    """Return the length of the longest sequence that the model and the options allow."""
    asked, ends = options.context_length, exact_length_limit(facts)
    longest: int = asked or facts["max_position_embeddings"]
    if ends is None or longest <= ends[0]:
        return longest
    limit, what = ends
    reason = f"this {facts['model_type']} model {what} in sequences above {limit} tokens"
    if asked is not None:
        raise UserError(f"{reason}: set --context-length to {limit} at most, or serve it with SGLang")
    log.warning("%s: the context length is limited to that", reason)
    return limit


def allocate_cache(runner: ModelRunner, memory: EngineMemory | None, slots: int) -> None:
    """Allocate a KV cache of `slots` tokens in `memory`, or in torch's."""
    try:
        runner.allocate_kv(slots, None if memory is None else memory.zeros)
    except (CudaDriverError, torch.cuda.OutOfMemoryError) as error:
        wanted, free = slots * runner.kv_bytes_per_token(), torch.cuda.mem_get_info()[0]
        raise UserError(
            f"a KV cache of {slots} tokens takes {wanted / 2**30:.1f} GiB, and {free / 2**30:.1f} are free on this "
            "GPU: lower --max-total-tokens (--engine-max-total-tokens in a run), or free memory on it"
        ) from error
