"""A data source that makes its prompts itself.

    --data-source-path examples/plugins/data_source.py

`get_samples` is all that is needed. `add_samples`, `save` and `load` are called if they are there; without them groups
that come back are kept and served first, and a resumed run starts the prompts over. A subclass of
`slime.rollout.data_source.RolloutDataSourceWithBuffer` has all of it, and --prompt-data.
"""

from slime.utils.types import Sample


class DataSource:
    """Sums, each harder than the one before."""

    def __init__(self, args):
        self.next_number = 1

    def get_samples(self, num_samples):
        """Samples, each of which becomes a group of --n-samples-per-prompt; or such groups."""
        numbers = range(self.next_number, self.next_number + num_samples)
        self.next_number += num_samples
        return [Sample(prompt=f"what is {n}+{n}?", label=str(2 * n)) for n in numbers]
