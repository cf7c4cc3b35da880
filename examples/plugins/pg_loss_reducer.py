"""How the policy loss of the tokens becomes one number: their sum over a fixed length (Dr. GRPO).

--custom-pg-loss-reducer-function-path examples/plugins/pg_loss_reducer.py
"""

import torch

LENGTH = 1000


def pg_loss_reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False):
    """A function of the token losses of some samples, which follow each other; returns the sum over the samples."""
    mask = torch.cat(loss_masks)

    def reduce(token_losses):
        return (token_losses * mask).sum() / LENGTH

    return reduce
