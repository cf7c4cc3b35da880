"""Losses other than the policy's: supervised, value, and the user's custom loss.

`policy_loss`, `sft_loss` and `critic_loss` are the objectives of the run in the form of a custom loss:
`(args, batch, logits, sum_of_sample_mean)`. Invariant: the reducer that is passed in is a weighted sum; its weights
replace the micro-batch's weights, and a loss has the scale of that reducer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from slime.algorithms.logprobs import log_probs_of_logits
from slime.algorithms.policy_loss import clipped_value_loss
from slime.algorithms.reduce import reducer_weights, weighted_sum
from slime.config import Config
from slime.config.plugins import load_function
from slime.config.plugins.view import plugin_args
from slime.errors import UserError
from slime.storage.json_types import JsonMapping
from slime.train.losses.policy import PolicyObjective
from slime.train.samples.micro_batch import LossOutcome, MicroBatch
from slime.train.samples.packing import pack
from slime.train.samples.rollout_data import PER_TOKEN, RolloutData, batch_for_plugins

Metrics = dict[str, Tensor]
LOSS_PARAMS = ("args", "batch", "logits", "sum_of_sample_mean")


def supervised_loss(micro: MicroBatch, log_probs: Tensor, _entropy: Tensor | None = None) -> LossOutcome:
    """Compute the negative log-likelihood of the unmasked response tokens."""
    loss = weighted_sum(-log_probs, micro.weights)
    return LossOutcome(loss, {"loss": loss.detach()})


def value_loss(micro: MicroBatch, values: Tensor, _entropy: Tensor | None = None, *, value_clip: float) -> LossOutcome:
    """Compute the squared error of the values against the returns, clipped around the old values."""
    token_loss, was_clipped = clipped_value_loss(
        values, micro.columns["values"], micro.columns["returns"], value_clip=value_clip
    )
    loss, clipped = weighted_sum(token_loss, micro.weights), weighted_sum(was_clipped, micro.weights)
    return LossOutcome(loss, {"loss": loss.detach(), "value_loss": loss.detach(), "value_clipfrac": clipped})


class CustomObjective:
    """The user's loss `f(args, batch, logits, sum_of_sample_mean)`, on the scale of `sum_of_sample_mean`."""

    def __init__(self, config: Config) -> None:
        path = config.custom_loss_function_path
        assert path is not None, "the flags were checked"
        self._path = path
        self._config = config
        self._function = load_function(path, what="--custom-loss-function-path", params=LOSS_PARAMS)

    def __call__(self, data: RolloutData, micro: MicroBatch, logits: Tensor, _entropy: Tensor) -> LossOutcome:
        """Compute the loss; a row without samples contributes 0 but stays in the graph, so that ranks stay in step."""
        if not micro.positions:
            return LossOutcome(logits.sum() * 0.0)

        def sum_of_sample_mean(values: Tensor) -> Tensor:
            return weighted_sum(values, micro.weights) / micro.scale

        given = plugin_args(self._config), batch_for_plugins(data, micro), logits, sum_of_sample_mean
        if self._config.recompute_loss_function:
            loss, metrics = checkpoint(self._function, *given, use_reentrant=False)
        else:
            loss, metrics = self._function(*given)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not isinstance(metrics, Mapping):
            raise UserError(f"{self._path} must return (scalar loss tensor, dict of metrics)")
        scaled = {name: torch.as_tensor(value).detach().to(loss) * micro.scale for name, value in metrics.items()}
        loss = loss * micro.scale
        return LossOutcome(loss, {"loss": loss.detach(), **scaled})


Batch = JsonMapping
"""The dict that custom losses get; its values are tensors and lists."""
Reducer = Callable[[Tensor], Tensor]


def response_rows(
    outputs: Tensor,
    unconcat_tokens: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the rows of `outputs` [1, T, V] that predict the response, and its tokens, sample by sample."""
    if outputs.dim() != 3 or len(outputs) != 1 or outputs.shape[1] < sum(total_lengths):
        raise UserError(
            f"logits of shape {list(outputs.shape)} do not match {sum(total_lengths)} tokens: they must be [1, T, V]"
        )
    end = 0
    for tokens, total, response in zip(unconcat_tokens, total_lengths, response_lengths, strict=True):
        end += total
        yield outputs[0, end - response - 1 : end - 1], tokens[len(tokens) - response :]


def response_log_probs(
    logits: Tensor, batch: Batch, *, temperature: float, chunk_rows: int, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    """Compute log-probs [R] and entropies [R] (zeros if not requested) of the batch's response tokens."""
    rows = list(response_rows(logits, batch["unconcat_tokens"], batch["total_lengths"], batch["response_lengths"]))
    found = [
        log_probs_of_logits(part / temperature, tokens, chunk_rows=chunk_rows, with_entropy=with_entropy)
        for part, tokens in rows
    ]
    log_probs = torch.cat([own for own, _ in found])
    entropies = [entropy for _, entropy in found if entropy is not None]
    return log_probs, torch.cat(entropies) if entropies else torch.zeros_like(log_probs)


def policy_loss(config: Config, batch: Batch, logits: Tensor, reducer: Reducer) -> tuple[Tensor, Metrics]:
    """Compute the surrogate loss with entropy, KL and corrections according to the flags."""
    objective = PolicyObjective(config)
    if objective.normalizes_weights:
        raise UserError(
            "--tis-batch-normalize needs the importance weights of a whole step, but a custom loss gets one "
            "micro-batch: remove the flag, or use --loss-type policy_loss"
        )
    log_probs, entropy = response_log_probs(
        logits,
        batch,
        temperature=config.rollout_temperature,
        chunk_rows=config.log_probs_chunk_size,
        with_entropy=True,
    )
    found = objective(_micro_batch(batch, log_probs, reducer), log_probs, entropy)
    return found.loss, found.sums


def sft_loss(config: Config, batch: Batch, logits: Tensor, reducer: Reducer) -> tuple[Tensor, Metrics]:
    """Compute the negative log-likelihood at temperature 1, because the tokens were not sampled."""
    chunk_rows = config.log_probs_chunk_size
    log_probs, _ = response_log_probs(logits, batch, temperature=1.0, chunk_rows=chunk_rows, with_entropy=False)
    found = supervised_loss(_micro_batch(batch, log_probs, reducer), log_probs)
    return found.loss, found.sums


def critic_loss(config: Config, batch: Batch, outputs: Tensor, reducer: Reducer) -> tuple[Tensor, Metrics]:
    """Compute the value loss of `outputs` [1, T, 1] against the batch's returns, clipped around its values."""
    rows = response_rows(outputs, batch["unconcat_tokens"], batch["total_lengths"], batch["response_lengths"])
    values = torch.cat([part.squeeze(-1) for part, _ in rows])
    found = value_loss(_micro_batch(batch, values, reducer), values, value_clip=config.value_clip)
    return found.loss, found.sums


def _micro_batch(batch: Batch, like: Tensor, reducer: Reducer) -> MicroBatch:
    """Make a micro-batch with the reducer's weights."""
    weights = reducer_weights(reducer, like.detach())
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
