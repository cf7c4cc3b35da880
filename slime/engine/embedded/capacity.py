"""How many tokens the KV cache has room for.

Invariant: what is given to the cache is no more than --mem-fraction of the memory that is free when the weights are
there, and leaves as much as the steps themselves need: graphs, activations of the longest extend step, logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from slime.engine.embedded.model.runner import ModelRunner
from slime.engine.embedded.options import EngineOptions
from slime.errors import UserError

_CPU_KV_BYTES = 2 << 30
_LOGITS_KEPT = 8  # fp32 logits of a whole batch that graphs of all sizes and drawing take together


def affordable_slots(runner: ModelRunner, options: EngineOptions, facts: Mapping[str, Any], context_len: int) -> int:
    """As many as the memory has room for, and never more than all running requests can fill.

    `facts` is the text model's config.
    """
    budget, reason = _budget(runner, options, facts)
    states = runner.states.total_bytes(runner.dtype)
    if states and states > budget:
        raise UserError(
            f"the states of {options.max_running_requests} running requests take {states / 2**30:.1f} GiB, "
            f"and there are {max(budget, 0) / 2**30:.1f}{reason}: lower --max-running-requests, or raise --mem-fraction"
        )
    budget = budget - states if runner.cuda else min(budget - states, _CPU_KV_BYTES)
    if runner.cuda and budget < runner.kv_bytes_per_token():
        raise UserError(
            f"no memory is left for the KV cache{reason}: lower --chunked-prefill-size or --max-running-requests, "
            "raise --mem-fraction, or free memory on this GPU"
        )
    wanted = options.max_running_requests * context_len
    return max(1, min(wanted, budget // runner.kv_bytes_per_token()))


def _budget(runner: ModelRunner, options: EngineOptions, facts: Mapping[str, Any]) -> tuple[int, str]:
    """Bytes, and what else was taken away from them."""
    if not runner.cuda:
        return int(_available_ram() * options.mem_fraction), ""
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    kept = step_bytes(runner.dtype, options, facts)
    return min(int(free * options.mem_fraction), free - kept), f", beside {kept / 2**30:.1f} GiB that steps need"


def step_bytes(dtype: torch.dtype, options: EngineOptions, facts: Mapping[str, Any]) -> int:
    """What computing takes at most, by the model's shape: an extend step's activations, and logits."""
    hidden, heads = facts["hidden_size"], facts["num_attention_heads"]
    inner = max(facts.get("intermediate_size") or 0, 4 * hidden)
    wide = heads * (facts.get("head_dim") or hidden // heads)
    token = dtype.itemsize * (4 * inner + 6 * wide) + 4 * 4 * hidden  # norms compute in fp32
    return options.chunked_prefill_size * token + options.max_running_requests * facts["vocab_size"] * 4 * _LOGITS_KEPT


def _available_ram() -> int:
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024
    return _CPU_KV_BYTES
