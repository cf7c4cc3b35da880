"""Decoder layers through torch.compile, one at a time: what is compiled for the first serves all that are like it.

To the compiler a layer's attention is one op that takes the layer's number, and numbers of modules are variables: so
neither the layer nor the batch size is built into the code. torch keeps what it compiled on disk
(TORCHINDUCTOR_CACHE_DIR), where the next start finds it.
Invariant: a layer that cannot be compiled runs as it is, with a note; the numbers are those of the same operations.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from slime.engine.embedded.model.attention import AttentionContext, Rules

log = logging.getLogger(__name__)

T = TypeVar("T")
_numbers = itertools.count()


class CompiledLayers:
    """The layers of a decoder, compiled while `run` runs and as they were otherwise."""

    def __init__(
        self, decoder: nn.Module, context: AttentionContext, backend: str | Callable[..., Any] = "inductor"
    ) -> None:
        if context.opaque is None:
            context.opaque = opaque_attention(context)
        self._layers = decoder_layers(decoder)
        self._forwards = [torch.compile(layer.forward, dynamic=True, backend=backend) for layer in self._layers]

    def run(self, function: Callable[[], T]) -> T:
        """`function`, in which calls of layers are compiled."""
        if not self._forwards:
            return function()
        try:
            with self._in_place(), torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
                return function()
        except torch._dynamo.exc.TorchDynamoException as error:
            log.warning("this model's layers cannot be compiled and run as they are: %s", error, exc_info=error)
            self._forwards = []
            return function()

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        for layer, forward in zip(self._layers, self._forwards, strict=True):
            layer.forward = forward
        try:
            yield
        finally:
            for layer in self._layers:
                del layer.forward


def decoder_layers(decoder: nn.Module) -> list[nn.Module]:
    """The longest list of modules in it: transformers' decoders have their layers there."""
    lists = [list(module) for module in decoder.children() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[])


def opaque_attention(context: AttentionContext) -> Callable[..., torch.Tensor]:
    """`context.attend` as an op of its own, which no compiler looks into."""

    @torch.library.custom_op(f"slime::attend_{next(_numbers)}", mutates_args=())
    def attend(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: int,
        scale: float,
        softcap: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        rules = Rules(scale, context.windows[layer], softcap or None, sinks)
        return context.attend(layer, q, k, v, rules).contiguous()

    @attend.register_fake
    def _(q, k, v, layer, scale, softcap, sinks):
        return q.new_empty(q.shape[2], q.shape[1], v.shape[3])

    return attend
