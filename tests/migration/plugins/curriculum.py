"""Data sources of a user: easy prompts first, and one that walks its dataset by itself."""

import copy

from slime.rollout.data_source import DataSource, RolloutDataSource, RolloutDataSourceWithBuffer
from slime.utils.types import Sample


class EasyFirst(RolloutDataSourceWithBuffer):
    """Prompts by the size of their answer; every group says how many came before it."""

    def __init__(self, args):
        super().__init__(args)
        self.dataset.samples = sorted(self.dataset.origin_samples, key=lambda sample: int(sample.label))
        self.metadata["handed_out"] = 0

    def get_samples(self, num_samples):
        groups = super().get_samples(num_samples)
        for group in groups:
            for sample in group:
                sample.metadata["level"] = self.get_metadata()["handed_out"]
            self.update_metadata({"handed_out": self.metadata["handed_out"] + 1})
        return groups


class Walker(RolloutDataSource):
    """Upstream's walk over the dataset, written out; groups that come back are dropped."""

    def get_samples(self, num_samples):
        if self.sample_offset + num_samples <= len(self.dataset):
            prompts = self.dataset.samples[self.sample_offset : self.sample_offset + num_samples]
            self.sample_offset += num_samples
        else:
            prompts = list(self.dataset.samples[self.sample_offset :])
            num_samples -= len(prompts)
            self.epoch_id += 1
            if self.args.rollout_shuffle:
                self.dataset.shuffle(self.epoch_id)
            prompts += self.dataset.samples[:num_samples]
            self.sample_offset = num_samples
        groups = []
        for prompt in prompts:
            group = []
            for _ in range(self.args.n_samples_per_prompt):
                sample = copy.deepcopy(prompt)
                sample.group_index = self.sample_group_index
                sample.index = self.sample_index
                self.sample_index += 1
                group.append(sample)
            self.sample_group_index += 1
            groups.append(group)
        return groups

    def add_samples(self, samples):
        pass


class Counting(DataSource):
    """Prompts out of thin air."""

    def __init__(self, args):
        self.args = args
        self.count = 0

    def get_samples(self, num_samples):
        groups = []
        for _ in range(num_samples):
            sample = Sample(prompt=f"count from {self.count}", label=str(self.count))
            groups.append([copy.deepcopy(sample) for _ in range(self.args.n_samples_per_prompt)])
            self.count += 1
        return groups

    def add_samples(self, samples):
        raise NotImplementedError

    def save(self, rollout_id):
        pass

    def load(self, rollout_id=None):
        pass

    def __len__(self):
        return 100
