"""Shrinks a model for self-checks: the same code and the same kinds of layers, in smaller sizes.

Before an engine or a trainer loads the weights of the large model, it compares its results on the small one with
transformers'. Invariant: the properties that decide how layers mix tokens do not change (head sizes, kinds of layers,
rotary embeddings). Windows, and lengths at which a rotary embedding changes, become shorter than the test sequences.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from slime.errors import UserError
from slime.models.folder import first_line
from slime.models.windows import LAYER_NUMBERS, window_fields

WINDOW = 8
ROPE_LENGTH = 16
LENGTHS = (3, 11, 11, 24)
"""Lengths of the sequences that are compared: shorter than a window, longer than two, longer than ROPE_LENGTH."""
_HIDDEN, _INNER, _HEADS, _KV_HEADS, _VOCAB, _FEWEST_LAYERS = 64, 48, 4, 2, 128, 2
_MOST_PARAMETERS = 100_000_000
_SPREAD = 2.0  # of logits
_HEAD_COUNTS = ("num_attention_heads", "index_n_heads")
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_TOPK = ("num_experts_per_tok", "moe_topk", "moe_k")
_UNSTABLE_ROPES = ("dynamic", "longrope")


def small_model(kind: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    """Build a small model of this class, in float32 on the CPU, with transformers' eager attention and random weights.

    Several ways to shrink are tried, since some families require coupled sizes or all layers. Raises UserError if
    transformers cannot compute any of the small models.
    """
    failures = []
    for ways in _SHRINK_PLANS:
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad(), _quiet_transformers():
                torch.manual_seed(0)
                made = _shrink_config(config, ways)
                with torch.device("meta"):
                    count = sum(parameter.numel() for parameter in kind._from_config(made).parameters())
                if count > _MOST_PARAMETERS:
                    raise ValueError(f"it still has {count / 1e6:.0f} million parameters")
                model = kind._from_config(made, dtype=torch.float32, attn_implementation="eager").eval()
                _draw_weights(model)
                _limit_logit_spread(model)
                return model
        except Exception as cause:  # noqa: BLE001 - a family's code may raise anything if sizes do not fit
            failures.append(cause)
    raise UserError(
        f"transformers cannot compute a small {config.model_type} model ({first_line(failures[0])}), so its numbers "
        "cannot be compared: choose another model"
    ) from failures[0]


def sample_tokens(seed: int = 0) -> list[list[int]]:
    """The token sequences that are compared; the two of equal length share a prefix, like responses to one prompt."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(3, 100, (length,), generator=generator).tolist() for length in LENGTHS]
    rows[2][:9] = rows[1][:9]
    return rows


@torch.no_grad()
def logits_of(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Logits [T, V] of one sequence, by transformers' own forward."""
    found: Tensor = model(input_ids=tokens[None], use_cache=False).logits[0]
    return found.float()


@torch.no_grad()
def plain_logits(model: PreTrainedModel, sequences: list[list[int]]) -> list[Tensor]:
    """Logits [T, V] of each sequence alone, short ones first: `dynamic` rotary embeddings keep the longest length."""
    found: dict[int, Tensor] = {}
    for place in sorted(range(len(sequences)), key=lambda i: len(sequences[i])):
        found[place] = logits_of(model, torch.tensor(sequences[place]))
    return [found[place] for place in range(len(sequences))]


def _shrink_config(config: PretrainedConfig, ways: Sequence[Callable[[PretrainedConfig], None]]) -> PretrainedConfig:
    """A copy of a config and of its parts, each shrunk in these ways."""
    made = copy.deepcopy(config)
    for part in _config_parts(made):
        for shrink in ways:
            shrink(part)
    facts = made.to_dict()
    facts.pop("quantization_config", None)
    found: PretrainedConfig = type(made).from_dict(facts)
    return found


def _config_parts(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PretrainedConfig):
            yield from _config_parts(value)


def _cap_field(config: PretrainedConfig, name: str, most: int) -> None:
    value = getattr(config, name, None)
    if isinstance(value, int) and not isinstance(value, bool) and value > most:
        setattr(config, name, most)


def _shrink_widths(config: PretrainedConfig, *, is_coupled: bool) -> None:
    """Shrink hidden sizes and head counts.

    `is_coupled`: the hidden size is the total size of all heads; otherwise only if the config has no `head_dim`.
    """
    heads, kv_heads = getattr(config, "num_attention_heads", None), getattr(config, "num_key_value_heads", None)
    if isinstance(heads, int) and isinstance(kv_heads, int) and kv_heads and "num_key_value_heads" in config.to_dict():
        config.num_key_value_heads = min(kv_heads, _KV_HEADS if kv_heads < heads else _HEADS)
    hidden, head_dim = getattr(config, "hidden_size", None), vars(config).get("head_dim")
    if isinstance(heads, int) and isinstance(hidden, int):
        is_free = isinstance(head_dim, int) and not is_coupled
        _cap_field(config, "hidden_size", _HIDDEN if is_free else (head_dim or hidden // heads) * min(heads, _HEADS))
    for name in _HEAD_COUNTS:
        _cap_field(config, name, _HEADS)
    for name in list(config.to_dict()):
        if name.endswith(("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "d_ff")):
            _cap_field(config, name, _INNER)


def _shrink_vocabulary(config: PretrainedConfig) -> None:
    facts = config.to_dict()
    for name, value in facts.items():
        if name.startswith("vocab_size"):
            _cap_field(config, name, _VOCAB)
        elif name.endswith(("token_id", "token_index")):
            if isinstance(value, list):
                setattr(config, name, [min(token, _VOCAB - 1) for token in value])
            _cap_field(config, name, _VOCAB - 1)


def _shrink_experts(config: PretrainedConfig) -> None:
    """Reduce the experts to as many as the groups and the top-k of a token require."""
    facts = config.to_dict()
    topk = next((facts[name] for name in _TOPK if isinstance(facts.get(name), int)), 2)
    groups, kept = facts.get("n_group") or 1, facts.get("topk_group") or 1
    for name in _EXPERTS:
        _cap_field(config, name, groups * max(2, -(-topk // kept)) if groups > 1 else max(2 * topk, 4))


def _shrink_windows(config: PretrainedConfig) -> None:
    for name in window_fields(config.to_dict()):
        _cap_field(config, name, WINDOW)
    _cap_field(config, "index_topk", WINDOW)
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict) and rope.get("rope_type") in _UNSTABLE_ROPES:
        if "original_max_position_embeddings" in rope:
            rope["original_max_position_embeddings"] = ROPE_LENGTH
        _cap_field(config, "original_max_position_embeddings", ROPE_LENGTH)
        if rope["rope_type"] == "dynamic":
            _cap_field(config, "max_position_embeddings", ROPE_LENGTH)


def _shrink_depth(config: PretrainedConfig) -> None:
    """Keep the first layers, up to the first one of the last kind."""
    layers = getattr(config, "num_hidden_layers", None)
    if not isinstance(layers, int) or layers <= _FEWEST_LAYERS:
        return
    facts = config.to_dict()
    per_layer = {name: value for name, value in facts.items() if isinstance(value, list) and len(value) == layers}
    if "layer_types" in per_layer:
        facts.pop("max_window_layers", None)  # layer_types were derived from it
    kinds = list(zip(*([repr(entry) for entry in value] for value in per_layer.values()), strict=True)) or [()] * layers
    numbers = [v for name, v in facts.items() if isinstance(v, int) and any(part in name for part in LAYER_NUMBERS)]
    fewest = [*(kinds.index(kind) + 1 for kind in set(kinds)), *(number + 1 for number in numbers if number < layers)]
    depth = max(_FEWEST_LAYERS, *fewest)
    config.num_hidden_layers = depth
    for name, value in per_layer.items():
        setattr(config, name, value[:depth])
    for name, value in facts.items():
        if isinstance(value, dict) and value and all(str(key).isdigit() for key in value):  # by layer
            setattr(config, name, {key: entry for key, entry in value.items() if int(key) < depth})


_DECOUPLED = (partial(_shrink_widths, is_coupled=False), _shrink_vocabulary, _shrink_experts, _shrink_windows)
_COUPLED = (partial(_shrink_widths, is_coupled=True), *_DECOUPLED[1:])
_SHRINK_PLANS: tuple[tuple[Callable[[PretrainedConfig], None], ...], ...] = (
    (*_DECOUPLED, _shrink_depth),
    (*_COUPLED, _shrink_depth),
    _DECOUPLED,
    _COUPLED,
    (_shrink_vocabulary, _shrink_experts, _shrink_windows, _shrink_depth),
)


def _draw_weights(model: PreTrainedModel) -> None:
    """Draw weights that make every part matter: attention is uneven, biases and norms are not neutral."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(0.1 * torch.randn_like(parameter))
        else:
            parameter.copy_(torch.randn_like(parameter) * max(parameter.shape[-1], 1) ** -0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("bias") and buffer.is_floating_point():
            buffer.add_(0.1 * torch.randn_like(buffer))


def _limit_logit_spread(model: PreTrainedModel) -> None:
    """Scale the output layer so that no token is certain: the log-prob of a certain token hides wrong logits."""
    spread = float(logits_of(model, torch.arange(3, 8)).std())
    if not math.isfinite(spread):
        raise ValueError("its logits are not finite")
    output = model.get_output_embeddings()
    if output is not None and spread > _SPREAD:
        output.weight.mul_(_SPREAD / spread)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Hides the notices that transformers logs about configs."""
    log = logging.getLogger("transformers")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
