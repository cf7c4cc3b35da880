"""Our own losses as a custom loss calls them: `(args, batch, logits, sum_of_sample_mean)`.

Invariant: they are the objectives of the run itself. The reducer that is passed in is a weighted sum, so its weights
take the place of the micro-batch's own; a loss has the scale of that reducer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from slime.algorithms.logprobs import log_probs_of_logits
from slime.algorithms.reduce import weights_of
from slime.config import Config
from slime.errors import UserError
from slime.train.losses.objectives import Metrics, supervised_loss, value_loss
from slime.train.losses.policy_objective import PolicyObjective
from slime.train.samples.micro_batch import MicroBatch
from slime.train.samples.packing import pack
from slime.train.samples.rollout_data import PER_TOKEN

Batch = Mapping[str, Any]
Reducer = Callable[[Tensor], Tensor]


def response_rows(
    outputs: Tensor,
    unconcat_tokens: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
) -> Iterator[tuple[Tensor, Tensor]]:
    """(the rows of `outputs` [1, T, V] that predict the response, its tokens), sample by sample."""
    if outputs.dim() != 3 or len(outputs) != 1 or outputs.shape[1] < sum(total_lengths):
        raise UserError(
            f"logits of shape {list(outputs.shape)} do not belong to {sum(total_lengths)} tokens: a packed row's are "
            "[1, T, V]"
        )
    end = 0
    for tokens, total, response in zip(unconcat_tokens, total_lengths, response_lengths, strict=True):
        end += total
        yield outputs[0, end - response - 1 : end - 1], tokens[len(tokens) - response :]


def scored(
    logits: Tensor, batch: Batch, *, temperature: float, chunk_rows: int, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    """Log-probs [R] and entropies [R] (zeros when not asked for) of the batch's response tokens."""
    rows = list(response_rows(logits, batch["unconcat_tokens"], batch["total_lengths"], batch["response_lengths"]))
    found = [
        log_probs_of_logits(part / temperature, tokens, chunk_rows=chunk_rows, with_entropy=with_entropy)
        for part, tokens in rows
    ]
    log_probs = torch.cat([own for own, _ in found])
    entropies = [entropy for _, entropy in found if entropy is not None]
    return log_probs, torch.cat(entropies) if entropies else torch.zeros_like(log_probs)


def policy_loss(config: Config, batch: Batch, logits: Tensor, reducer: Reducer) -> tuple[Tensor, Metrics]:
    """The surrogate with entropy, KL and corrections as the flags say."""
    objective = PolicyObjective(config)
    correction = objective.settings.correction
    if correction is not None and correction.batch_normalize:
        raise UserError(
            "--tis-batch-normalize needs the importance weights of a whole step, and a custom loss sees one "
            "micro-batch: drop the flag, or train with --loss-type policy_loss"
        )
    log_probs, entropy = scored(
        logits,
        batch,
        temperature=config.rollout_temperature,
        chunk_rows=config.log_probs_chunk_size,
        with_entropy=True,
    )
    return objective(_micro_batch(batch, log_probs, reducer), log_probs, entropy)


def sft_loss(config: Config, batch: Batch, logits: Tensor, reducer: Reducer) -> tuple[Tensor, Metrics]:
    """Negative log-likelihood; nothing was sampled, so there is no temperature."""
    chunk_rows = config.log_probs_chunk_size
    log_probs, _ = scored(logits, batch, temperature=1.0, chunk_rows=chunk_rows, with_entropy=False)
    return supervised_loss(_micro_batch(batch, log_probs, reducer), log_probs)


def critic_loss(config: Config, batch: Batch, outputs: Tensor, reducer: Reducer) -> tuple[Tensor, Metrics]:
    """Of values [1, T, 1] against the batch's returns, clipped around its values."""
    rows = response_rows(outputs, batch["unconcat_tokens"], batch["total_lengths"], batch["response_lengths"])
    values = torch.cat([part.squeeze(-1) for part, _ in rows])
    return value_loss(_micro_batch(batch, values, reducer), values, value_clip=config.value_clip)


def _micro_batch(batch: Batch, like: Tensor, reducer: Reducer) -> MicroBatch:
    weights = weights_of(reducer, like.detach())
    sequences = [tokens.cpu().numpy() for tokens in batch["unconcat_tokens"]]
    columns = {
        name: torch.cat(list(batch[name])).to(like.detach())
        for name in PER_TOKEN
        if batch.get(name) is not None and len(batch[name])
    }
    return MicroBatch(
        row=pack(sequences, batch["response_lengths"], like.device),
        positions=list(range(len(sequences))),
        mask=torch.cat(list(batch["loss_masks"])).to(like.detach()),
        weights=weights,
        metric_weights=weights,
        scale=1.0,
        columns=columns,
    )
