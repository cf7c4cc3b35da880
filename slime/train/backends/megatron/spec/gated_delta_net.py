"""Gated delta nets (Qwen3-Next, Qwen3.5) over packed rows, sharded over heads.

Invariant: a token reads earlier tokens of its own sequence and nothing else. Parameters have the names and shapes of
Megatron's own layer, which supports neither packed rows nor context parallelism. A tensor-parallel rank has the same
part of the heads of queries, keys, values, gates, rates and decays. Around the convolution and the delta rule,
context-parallel ranks exchange tokens for heads, so that each computes whole sequences of some heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import GatedDeltaNet as MegatronDeltaNet
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.utils import divide
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional

from slime.train.backends.delta_kernels import (
    check_delta_kernels,
    delta_kernels,
    mix_tokens,
    to_own_heads,
    to_own_tokens,
)
from slime.train.backends.megatron.cp_rows import owners_and_offsets
from slime.train.backends.megatron.spec.attention import row_layout
from slime.train.backends.megatron.spec.linear import sum_gradient_over
from slime.train.topology import Ranks


class GatedDeltaNet(MegatronDeltaNet):
    """A layer with the parameters and checkpoints of Megatron's gated delta net; builds and computes them itself."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: GatedDeltaNetSubmodules,
        layer_number: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        backend: str | None = None,
    ) -> None:
        MegatronModule.__init__(self, config)
        assert pg_collection is not None
        self.layer_number, self.pg_collection, self.conv_bias = layer_number, pg_collection, False
        self.tp_size = pg_collection.tp.size()
        self.key_head_dim, self.value_head_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self.num_key_heads, self.num_value_heads = config.linear_num_key_heads, config.linear_num_value_heads
        self.qk_dim, self.v_dim = self.key_head_dim * self.num_key_heads, self.value_head_dim * self.num_value_heads
        self.in_proj_dim = 2 * self.qk_dim + 2 * self.v_dim + 2 * self.num_value_heads
        self.conv_dim_local_tp = (2 * self.qk_dim + self.v_dim) // self.tp_size
        self._backend, self._context = backend, pg_collection.cp
        check_delta_kernels(backend)
        divide(self.num_key_heads, self.tp_size * self._context.size())  # the plan checks it earlier
        common = {"config": config, "bias": False, "is_expert": False, "tp_group": self.pg_collection.tp}
        self.in_proj = build_module(
            submodules.in_proj,
            config.hidden_size,
            self.in_proj_dim,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="fc1",
            **common,
        )
        self.conv1d = _WeightModule(config, (self.conv_dim_local_tp, 1, config.linear_conv_kernel_dim), cut=True)
        heads = self.num_value_heads // self.tp_size
        self.dt_bias = _WeightModule(config, (heads,), cut=True).weight
        self.A_log = _WeightModule(config, (heads,), cut=True).weight
        self.out_norm = _WeightModule(config, (self.value_head_dim,), cut=False)
        self.out_proj = build_module(
            submodules.out_proj,
            self.v_dim,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="fc2",
            **common,
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *_: object,
        packed_seq_params: PackedSeqParams | None = None,
        **__: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Map hidden states [S, B, H] to [S, B, H]; B is 1 for a packed row."""
        projected, _bias = self.in_proj(hidden_states)
        tokens, count = projected.shape[:2]
        context = self._context.size()
        alike = (tokens * context,) * count
        lengths = alike if packed_seq_params is None else row_layout(packed_seq_params).lengths
        size = self.tp_size
        widths = [self.qk_dim, self.qk_dim, self.v_dim, self.v_dim, self.num_value_heads, self.num_value_heads]
        rows = projected.transpose(0, 1).flatten(0, 1)
        q, k, v, gate, rate, decay = rows.split([width // size for width in widths], dim=-1)
        heads = self.num_key_heads // size
        states = [part.unflatten(-1, (heads, -1)) for part in (q, k, v, rate, decay)]
        if context == 1:
            mixed = self._mix(states, lengths, 0, 1)
        else:
            ranks = Ranks.of(self._context, hidden_states.device)
            owner, local = owners_and_offsets(np.array(lengths), np.array(lengths), context)
            order = torch.from_numpy(owner * (sum(lengths) // context) + local).to(hidden_states.device)
            mixed = self._mix(to_own_heads(states, ranks, order), lengths, ranks.rank, context)
            mixed = to_own_tokens(mixed, ranks, order)
        output = self._gated_norm(mixed.reshape(len(rows), -1, self.value_head_dim), gate)
        result: tuple[Tensor, Tensor | None] = self.out_proj(output.unflatten(0, (count, tokens)).transpose(0, 1))
        return result

    def _mix(self, states: Sequence[Tensor], lengths: Sequence[int], part: int, parts: int) -> Tensor:
        """Apply convolution and delta rule to part `part` of `parts` of this rank's heads."""
        widths = [self.qk_dim // self.tp_size, self.qk_dim // self.tp_size, self.v_dim // self.tp_size]
        weight = torch.cat([own.chunk(parts)[part] for own in self.conv1d.weight.squeeze(1).split(widths)])
        a_log, bias = (tensor.chunk(parts)[part] for tensor in (self.A_log, self.dt_bias))
        kernels = delta_kernels(self._backend, tuple(lengths), states[0].device)
        return mix_tokens(kernels, states, (weight, None), a_log, bias.float(), self.value_head_dim)

    def _gated_norm(self, states: Tensor, gate: Tensor) -> Tensor:
        """Normalise and gate states [T, heads, V] to [T, heads x V].

        All heads share one scale, and each rank has some of the heads, so its gradient is summed over the ranks.
        """
        weight = sum_gradient_over(self.out_norm.weight, self.pg_collection.tp)
        normed = functional.rms_norm(states.float(), (self.value_head_dim,), None, self.config.layernorm_epsilon)
        scaled = weight * normed.to(states.dtype)
        return (scaled * functional.silu(gate.float().reshape(states.shape))).to(states.dtype).flatten(1)


class _WeightModule(nn.Module):
    """A module with one parameter, as in Megatron's layer; `cut`: it is sharded over the tensor-parallel ranks."""

    def __init__(self, config: TransformerConfig, shape: tuple[int, ...], *, cut: bool) -> None:
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.device("cuda", torch.cuda.current_device())
        self.weight = nn.Parameter(torch.ones(shape, dtype=config.params_dtype, device=device))
        if cut:
            set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)
