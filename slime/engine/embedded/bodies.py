"""Which code computes a model on CUDA: our own kernels for the families that have them, else transformers' modules."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from slime.engine.embedded.fused.families import Block, block_of, tensor_shapes, together
from slime.engine.embedded.fused.rope import NotFused
from slime.engine.embedded.memory import lay_together

if TYPE_CHECKING:
    from slime.engine.embedded.model.body import Body
    from slime.engine.embedded.model.runner import ModelRunner

log = logging.getLogger(__name__)


def fused_block(facts: Mapping[str, Any], model: nn.Module) -> Block | None:
    """A model with such a (text) config as the fused kernels compute it; None, with a note, where they do not."""
    try:
        block = block_of(facts)
        own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        if any(own.get(name) != shape for name, shape in tensor_shapes(block).items()):
            raise NotFused("its weights have other names or shapes than its kind of model has")
    except NotFused as reason:
        log.info("transformers' own code computes this model: %s", reason)
        return None
    return block


def make_body(
    runner: ModelRunner, block: Block | None, *, most: int, positions: int, owned: bool, compile_layers: bool
) -> Body:
    """`owned`: the weights lie where the engine put them, those of one product together; else they are put so here."""
    if block is None:
        from slime.engine.embedded.model.body import GeneralBody

        if compile_layers:
            log.info("compiling the decoder layers: this takes some seconds (--no-compile skips it)")
        return GeneralBody(runner, compile_layers=compile_layers)
    from slime.engine.embedded.fused.body import FusedBody

    if not owned:
        lay_together(runner.model, together(block))
    tensors, context = runner.model.state_dict(), runner.context
    return FusedBody(block, tensors, context, most=most, positions=positions, routed=runner.experts)
