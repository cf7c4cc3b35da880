"""Optimises a model's layers for fp32 on a CPU, and compiles decoder layers with torch.compile.

Invariant: names, shapes and values of the weights do not change. Neither does the result of a layer: of a matrix
product up to the order of its sums, of a norm to the bit. A layer for which this is not certain is not replaced.

Decoder layers are compiled one at a time; what is compiled for the first is reused by all similar layers. To the
compiler a layer's attention is one op that takes the layer's number, and numbers of modules are variables, so neither
the layer nor the batch size is built into the code. torch caches compiled code on disk (TORCHINDUCTOR_CACHE_DIR) for
the next start. Invariant: a layer that cannot be compiled runs uncompiled, with a warning.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from slime.engine.embedded.model.attention import AttentionContext, Rules

_PACKED_ELEMENTS = 1 << 18  # a packed product has 50 us more overhead than a plain one: too much for small matrices

_MOST_ROWS = 512  # with more rows, the cost of packing the weight in the call is negligible

Inputs = dict[nn.Linear, torch.Tensor]


class PackedWeights:
    """Concatenated weights of linear layers that read the same input, packed for the CPU's kernels.

    A plain product packs its weight in every call: with few rows that takes as long as the product. The first layer
    called with an input computes the outputs of all layers, and the others return their cached part. The packed copy
    is made lazily, and again after `forget`, which must be called after a write to the weights.
    """

    def __init__(self, layers: list[nn.Linear]) -> None:
        self._layers = layers
        self._widths = [layer.out_features for layer in layers]
        self._packed: torch.Tensor | None = None
        self._bias: torch.Tensor | None = None
        self._input: torch.Tensor | None = None
        self._outputs: list[torch.Tensor | None] = []

    def forget(self) -> None:
        self._packed = self._bias = None

    def product(self, place: int, input: torch.Tensor) -> torch.Tensor:
        """Return the output of the layer at `place` for `input`."""
        output = self._outputs[place] if self._input is input else None
        if output is None:
            if self._packed is None:
                weight = torch.cat([layer.weight.detach() for layer in self._layers]).contiguous()
                self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
                biases = [layer.bias.detach() for layer in self._layers if layer.bias is not None]
                self._bias = torch.cat(biases) if biases else None
            products = torch.ops.mkldnn._linear_pointwise(input, self._packed, self._bias, "none", [], "")
            self._outputs = list(products.split(self._widths, -1))
            self._input = input
            output = self._outputs[place]
        self._outputs[place] = None
        if not any(left is not None for left in self._outputs):
            self._input = None
        assert output is not None
        return output


class PackedLinear(nn.Linear):
    """A linear layer with the parameters of `plain`, computed with packed weights."""

    def __init__(self, plain: nn.Linear, packed: PackedWeights, place: int) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.weight, self.bias = plain.weight, plain.bias
        self._packed, self._place = packed, place

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = input.numel() // self.in_features
        if 1 < rows <= _MOST_ROWS:
            return self._packed.product(self._place, input)
        return F.linear(input, self.weight, self.bias)  # a single row reads every weight once, packed or not


@contextmanager
def inputs_of_linears(model: nn.Module) -> Iterator[Inputs]:
    """Record the input of each linear layer in the forward passes within the `with` block."""
    seen: Inputs = {}

    def note(layer: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        assert isinstance(layer, nn.Linear)
        seen[layer] = given[0]

    hooks = [m.register_forward_pre_hook(note) for m in model.modules() if isinstance(m, nn.Linear)]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def prepare_layers(model: nn.Module, inputs: Inputs, *, pack: bool) -> list[PackedWeights]:
    """Replace layers by their fast forms; returns the packed weights, to `forget` after a write to the weights.

    Linear weights `[out, in]` are stored column by column, without a change of shape or values: the CPU's fp32 product
    of 8 to 64 rows with such a matrix is 1.5 to 2.5 times as fast, and with more rows it is not slower.
    """
    fast: dict[nn.Module, nn.Module] = {m: norm for m in model.modules() if (norm := torch_rms_norm(m)) is not None}
    packed = []
    if pack:  # linear layers of one parent that read the same tensor, where they are large enough together
        groups: dict[tuple[int, ...], list[nn.Linear]] = {}
        for parent in model.modules():
            for layer in parent.children():
                if type(layer) is nn.Linear:
                    key = (id(parent), id(inputs.get(layer, layer)), layer.bias is None)
                    groups.setdefault(key, []).append(layer)
        for layers in groups.values():
            if sum(layer.weight.numel() for layer in layers) >= _PACKED_ELEMENTS:
                packed.append(PackedWeights(layers))
                fast |= {layer: PackedLinear(layer, packed[-1], place) for place, layer in enumerate(layers)}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child in fast:
                setattr(parent, name, fast[child])
    with torch.no_grad():
        for child in model.modules():
            if isinstance(child, nn.Linear):  # an embedding tied to it is the same parameter
                child.weight.data = child.weight.t().contiguous().t()
    return packed


def torch_rms_norm(layer: nn.Module) -> nn.RMSNorm | None:
    """Return torch's RMSNorm with the weight of `layer` if both give the same bits: one call instead of eight."""
    numbers = [value for value in vars(layer).values() if isinstance(value, float)]
    if (
        not type(layer).__name__.endswith("RMSNorm")
        or len(numbers) != 1
        or [*dict(layer.named_parameters())] != ["weight"]
    ):
        return None
    weight = layer.weight
    assert isinstance(weight, nn.Parameter)
    norm = nn.RMSNorm(weight.shape, eps=numbers[0])
    norm.weight = weight
    probe = torch.linspace(-3.0, 5.0, 4 * weight.numel()).view(4, -1) * torch.tensor([1e-4, 1e-2, 1.0, 1e3])[:, None]
    with torch.no_grad():
        return norm if torch.equal(norm(probe), layer(probe)) else None


log = logging.getLogger(__name__)

T = TypeVar("T")
_numbers = itertools.count()


class CompiledLayers:
    """The layers of a decoder, compiled during `run` and unchanged otherwise."""

    def __init__(
        self, decoder: nn.Module, context: AttentionContext, backend: str | Callable[..., object] = "inductor"
    ) -> None:
        if context.opaque is None:  # a custom op, which compilers do not trace into

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

            context.opaque = attend
        self._layers = decoder_layers(decoder)
        self._forwards = [torch.compile(layer.forward, dynamic=True, backend=backend) for layer in self._layers]

    def run(self, function: Callable[[], T]) -> T:
        """Call `function` with compiled layers; if compilation fails, with the layers as they are, now and later."""
        if not self._forwards:
            return function()
        try:
            for layer, forward in zip(self._layers, self._forwards, strict=True):
                layer.forward = forward
            try:
                with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
                    return function()
            finally:
                for layer in self._layers:
                    del layer.forward
        except torch._dynamo.exc.TorchDynamoException as error:
            log.warning("the model's layers cannot be compiled and run uncompiled: %s", error, exc_info=error)
            self._forwards = []
            return function()


def decoder_layers(decoder: nn.Module) -> list[nn.Module]:
    """Return the longest module list of a decoder: transformers' decoders have their layers there."""
    lists = [list(module) for module in decoder.children() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[])
