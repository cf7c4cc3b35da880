"""Whether packed rows give what transformers' eager forward gives each of their sequences, tried before a training.

Invariant: a model that passes gave, on a small model of its config, the log-probs and entropies of transformers at
every position of sequences that are longer than any window, packed into one row, with shared prompts and without.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from slime.errors import UserError
from slime.models.folder import first_line
from slime.models.small import plain_logits, sample_tokens, small_model
from slime.train.backends.fsdp.attention import ATTENTION_NAME, register_packed_attention
from slime.train.backends.fsdp.packed_model import PolicyModel
from slime.train.samples.packing import pack

_TOLERANCE = 1e-3
"""Of log-probs, in standard deviations of the position's log-probs: rounding is off by a hundred-thousandth."""
_DRAWS = 3
"""A token that two experts suit equally may go to either; what is computed wrongly differs for all draws of tokens."""


def check_packed(model: PreTrainedModel) -> None:
    """Raise UserError where a packed row of a model of this class and config would be computed wrongly."""
    register_packed_attention()
    worst = np.inf
    for seed in range(_DRAWS):
        small = small_model(type(model), model.config)
        try:
            worst = min(worst, _difference(small, sample_tokens(seed)))
        except UserError:
            raise
        except Exception as cause:  # whatever the family's code raises
            raise UserError(
                f"--train-backend fsdp cannot compute packed rows of {model.config.model_type} models "
                f"({first_line(cause)}): choose another model"
            ) from cause
        if worst <= _TOLERANCE:
            return
    raise UserError(
        f"--train-backend fsdp computes {model.config.model_type} models wrongly (a log-prob of a small one differs by "
        f"{worst:.2g} standard deviations from transformers' eager forward): choose another model"
    )


@torch.no_grad()
def _difference(small: PreTrainedModel, sequences: list[list[int]]) -> float:
    """The largest of a log-prob or an entropy, in standard deviations of the log-probs at its position."""
    expected, entropies, spread = [], [], []
    for tokens, logits in zip(sequences, plain_logits(small, sequences), strict=True):
        log_probs = logits[:-1].log_softmax(-1)
        expected.append(log_probs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0])
        entropies.append(-(log_probs.exp() * log_probs).sum(-1))
        spread.append(log_probs.std(-1))
    small.set_attn_implementation(ATTENTION_NAME)
    policy = PolicyModel(small)
    arrays = [np.array(tokens) for tokens in sequences]
    worst = 0.0
    for share_prompts in (False, True):
        found = policy(pack(arrays, [len(tokens) - 1 for tokens in arrays], share_prompts=share_prompts))
        for numbers, wanted in zip(found, (expected, entropies), strict=True):
            worst = max(worst, _worst((numbers - torch.cat(wanted)).abs() / torch.cat(spread).clamp(min=1e-6)))
    return worst


def _worst(differences: Tensor) -> float:
    worst = float(differences.max())
    return worst if np.isfinite(worst) else float("inf")
