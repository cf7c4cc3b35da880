"""A model's layers in the form that a CPU computes fastest in fp32.

Invariant: names, shapes and values of the weights stay, and so does what a layer computes: a matrix product up to the
order of its sums, a norm to the bit. A layer for which this is not certain is left as it is.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from slime.engine.embedded.model.attention import AttentionContext, Rules

_PACKED_ELEMENTS = 1 << 18  # a packed product costs 50 us more than a plain one before it starts: small matrices lose

_MOST_ROWS = 512  # with more rows, packing the weight in the call costs nothing

Inputs = dict[nn.Linear, torch.Tensor]


class PackedWeights:
    """The weights of linear layers that read the same input, one below the other, as the CPU's kernels read them.

    A plain product packs its weight in every call: with few rows that takes as long as the product. The first layer
    that meets an input computes the outputs of all, and the others find theirs. The packed copy is made when it is
    needed, and again after `forget`, which whoever writes to the weights has to call.
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
        """What the layer at `place` makes of `input`."""
        output = self._outputs[place] if self._input is input else None
        if output is None:
            self._outputs = list(self._compute(input).split(self._widths, -1))
            self._input = input
            output = self._outputs[place]
        self._outputs[place] = None
        if not any(left is not None for left in self._outputs):
            self._input = None
        assert output is not None
        return output

    def _compute(self, input: torch.Tensor) -> torch.Tensor:
        if self._packed is None:
            weight = torch.cat([layer.weight.detach() for layer in self._layers]).contiguous()
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
            biases = [layer.bias.detach() for layer in self._layers if layer.bias is not None]
            self._bias = torch.cat(biases) if biases else None
        return torch.ops.mkldnn._linear_pointwise(input, self._packed, self._bias, "none", [], "")


class PackedLinear(nn.Linear):
    """A linear layer with the parameters of `plain`, computed by packed weights."""

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
    """What each linear layer read in the forward passes of the block."""
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


def prepare_layers(model: nn.Module, inputs: Inputs, *, pack: bool) -> Callable[[], None]:
    """Bring the model into its fast form; returns what has to be called when its weights have changed."""
    fast: dict[nn.Module, nn.Module] = {m: norm for m in model.modules() if (norm := plain_rms_norm(m)) is not None}
    packed = []
    if pack:
        for layers in worth_packing(model, inputs):
            packed.append(PackedWeights(layers))
            fast |= {layer: PackedLinear(layer, packed[-1], place) for place, layer in enumerate(layers)}
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if layer in fast:
                setattr(parent, name, fast[layer])
    store_by_input(model)

    def forget() -> None:
        for weights in packed:
            weights.forget()

    return forget


def worth_packing(model: nn.Module, inputs: Inputs) -> Iterable[list[nn.Linear]]:
    """Linear layers of one parent that read the same tensor, in groups that are large enough."""
    groups: dict[tuple[int, ...], list[nn.Linear]] = {}
    for parent in model.modules():
        for layer in parent.children():
            if type(layer) is nn.Linear:
                key = (id(parent), id(inputs.get(layer, layer)), layer.bias is None)
                groups.setdefault(key, []).append(layer)
    return [g for g in groups.values() if sum(layer.weight.numel() for layer in g) >= _PACKED_ELEMENTS]


def plain_rms_norm(layer: nn.Module) -> nn.RMSNorm | None:
    """torch's own RMSNorm with the weight of `layer`, where both compute the same to the bit: one call, not eight."""
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


def store_by_input(model: nn.Module) -> None:
    """Store every matrix `[out, in]` of the model column by column; its shape and its values stay.

    The CPU's fp32 product of 8 to 64 rows with a matrix stored like this is 1.5 to 2.5 times as fast, and of more rows
    no slower; in bf16 there is no difference.
    """
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, nn.Linear):  # an embedding tied to it is the same parameter
                layer.weight.data = layer.weight.t().contiguous().t()


# Decoder layers through torch.compile, one at a time: what is compiled for the first serves all that are like it.
#
# To the compiler a layer's attention is one op that takes the layer's number, and numbers of modules are variables: so
# neither the layer nor the batch size is built into the code. torch keeps what it compiled on disk
# (TORCHINDUCTOR_CACHE_DIR), where the next start finds it. Invariant: a layer that cannot be compiled runs as it is,
# with a note; the numbers are those of the same operations.

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
