"""Which groups of the buffer are served next: the newest ones.

--buffer-filter-path examples/plugins/buffer_filter.py
"""


def buffer_filter(args, rollout_id, buffer, num_samples):
    """At most `num_samples` groups, taken out of the buffer; new prompts fill the rest."""
    return [buffer.pop() for _ in range(min(num_samples, len(buffer)))]
