"""A loss of one's own: plain REINFORCE, without ratio or clipping.

--loss-type custom_loss --custom-loss-function-path examples/plugins/loss.py
"""

import torch


def loss(args, batch, logits, sum_of_sample_mean):
    """(loss, metrics). `batch` has every column of the rollout data; the samples follow each other in `logits`."""
    rows = logits.flatten(0, -2).float().log_softmax(-1)
    log_probs, end = [], 0
    for tokens, length in zip(batch["unconcat_tokens"], batch["response_lengths"], strict=True):
        end += len(tokens)
        response = tokens[len(tokens) - length :]
        log_probs.append(rows[end - length - 1 : end - 1].gather(-1, response[:, None])[:, 0])
    value = sum_of_sample_mean(-torch.cat(log_probs) * torch.cat(batch["advantages"]))
    return value, {"reinforce_loss": value.detach()}
