"""Rollout dumps: round trips, formats, and rejection of foreign files."""

import json

import numpy as np
import pytest
import torch

from slime.config import Config
from slime.data.sample import Sample
from slime.errors import UserError
from slime.rollout.base_types import leaves
from slime.rollout.debug_data import (
    DumpedRollouts,
    dump_path,
    head_and_tail,
    read_dump,
    regroup_samples,
    save_evaluation,
    write_dump,
)
from slime.train.trainer_group import write_train_dump

CONFIG = Config(rollout_batch_size=2, n_samples_per_prompt=2, rollout_num_gpus=1, hf_checkpoint="model")


def make_groups():
    """Two groups: a plain one, and one with a fan-out and a failure."""
    plain = [Sample(index=i, group_index=0, reward=float(i), status=Sample.Status.COMPLETED) for i in (0, 1)]
    plain[0].tokens, plain[0].response_length = [5, 6, 7], 2
    plain[0].rollout_log_probs, plain[0].loss_mask = [-0.1, -1 / 3], [1, 0]
    plain[0].metadata = {"tools": [{"name": "x"}], "none": None}
    plain[0].rollout_routed_experts = np.arange(12, dtype=np.int32).reshape(2, 3, 2)
    plain[0].spec_info.add({"spec_verify_ct": 3})
    fan_out = [Sample(index=2, group_index=1, rollout_id=2, response=str(i)) for i in (0, 1)]
    failed = Sample(index=3, group_index=1, status=Sample.Status.FAILED, failure="engine: x", remove_sample=True)
    return [plain, [fan_out, failed]]


@pytest.mark.parametrize("suffix", [".jsonl", ".pt"])
def test_dump_round_trip_preserves_groups(tmp_path, suffix):
    groups = make_groups()
    path = dump_path(str(tmp_path / "deep" / ("r_{rollout_id}" + suffix)), 4)
    assert path.name == f"r_4{suffix}"
    write_dump(path, 4, leaves(groups), CONFIG)
    assert read_dump(path) == groups
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_jsonl_dump_starts_with_a_header(tmp_path):
    path = tmp_path / "0.jsonl"
    write_dump(path, 0, leaves(make_groups()), CONFIG)
    header, *samples = map(json.loads, path.read_text().splitlines())
    assert (header["format"], header["version"], header["rollout_id"]) == ("slime-rollout", 1, 0)
    assert header["config"]["n_samples_per_prompt"] == 2
    assert [sample["index"] for sample in samples] == [0, 1, 2, 2, 3]


def test_pt_dump_reads_and_writes_the_upstream_format(tmp_path):
    path = tmp_path / "0.pt"
    write_dump(path, 7, leaves(make_groups()), CONFIG)
    content = torch.load(path, weights_only=True)
    assert content["rollout_id"] == 7
    assert [sample["status"] for sample in content["samples"]][-1] == "failed"
    samples = [{"index": 0, "tokens": [1], "reward": 1.0, "status": "completed", "trace": {"v": 1}}]
    torch.save({"rollout_id": 0, "samples": samples}, path)
    ((sample,),) = read_dump(path)
    assert (sample.reward, sample.trace) == (1.0, {"v": 1})


class NotPlain:
    pass


def test_invalid_dump_files_are_rejected(tmp_path):
    path = tmp_path / "0.jsonl"
    cases = [
        ("", "is not a rollout dump"),
        ('{"index": 0}\n', "is not a rollout dump"),
        ('{"format": "slime-rollout", "version": 2}\n', "has version 2 of the format, this slime reads version 1"),
        ('{"format": "slime-rollout", "version": 1}\n', "holds no samples"),
        ('{"format": "slime-rollout", "version": 1}\nnope\n', "0.jsonl:2: not valid JSON"),
        ('{"format": "slime-rollout", "version": 1}\n{"status": "odd"}\n', "has an invalid sample"),
    ]
    for text, sentence in cases:
        path.write_text(text)
        with pytest.raises(UserError) as caught:
            read_dump(path)
        assert sentence in str(caught.value)
    with pytest.raises(UserError, match=r"--load-debug-rollout-data: there is no dump .*gone\.pt"):
        read_dump(tmp_path / "gone.pt")
    torch.save({"samples": [NotPlain()]}, tmp_path / "bad.pt")
    with pytest.raises(UserError, match="is not a dump that can be read safely"):
        read_dump(tmp_path / "bad.pt")
    torch.save({"tensors": 1}, tmp_path / "bad.pt")
    with pytest.raises(UserError, match="it has no list of samples"):
        read_dump(tmp_path / "bad.pt")


def test_unserializable_metadata_is_rejected_by_name(tmp_path):
    sample = Sample(index=3, metadata={"tool": NotPlain()})
    for name in ("0.jsonl", "0.pt"):
        with pytest.raises(UserError, match=r"sample 3, metadata\.tool: a NotPlain cannot be saved"):
            write_dump(tmp_path / name, 0, [sample], CONFIG)
    assert list(tmp_path.iterdir()) == []


def test_samples_without_indices_become_separate_groups():
    samples = [Sample(response="a"), Sample(response="b")]
    assert regroup_samples(samples) == [[samples[0]], [samples[1]]]


@pytest.mark.parametrize(
    ("share", "kept"), [(0.5, [0, 1, 2, 8, 9]), (0.1, [0]), (0.01, [0]), (1.0, list(range(10))), (0.3, [0, 1, 9])]
)
def test_subsample_keeps_groups_from_both_ends(share, kept):
    groups = [[i] for i in range(10)]
    assert head_and_tail(groups, share) == [[i] for i in kept]


def test_dumped_rollouts_replay_samples_and_count_files(tmp_path):
    template = str(tmp_path / "{rollout_id}.jsonl")
    for rollout_id in (0, 1, 3):
        write_dump(dump_path(template, rollout_id), rollout_id, leaves(make_groups()), CONFIG)
    config = CONFIG.replace(load_debug_rollout_data=template, load_debug_rollout_data_subsample=0.5)
    dumps = DumpedRollouts(config)
    assert (dumps.count(0), dumps.count(3), dumps.count(7)) == (2, 4, 7)
    output = dumps.generate_rollout(config, 1, None)
    assert output.samples == make_groups()[:1]
    assert output.metrics["rollout/raw_reward"] == 0.5
    assert not [name for name in output.metrics if name.startswith("perf/")]
    one_file = DumpedRollouts(config.replace(load_debug_rollout_data=str(tmp_path / "0.jsonl")))
    with pytest.raises(UserError, match="one file for every rollout: give --num-rollout"):
        one_file.count(0)


def test_evaluation_dump_has_its_own_file_and_dataset_names(tmp_path):
    config = CONFIG.replace(save_debug_rollout_data=str(tmp_path / "r_{rollout_id}.jsonl"))
    good, bad = Sample(index=0, group_index=0), Sample(index=1, group_index=0)
    data = {"a": {"samples": [good], "rewards": [1.0], "failed": [bad]}, "b": {"samples": [good], "rewards": [1.0]}}
    save_evaluation(config, 2, data)
    samples = list(leaves(read_dump(tmp_path / "r_eval_2.jsonl")))
    assert [(sample.index, sample.eval_dataset) for sample in samples] == [(0, "a"), (1, "a"), (0, "b")]
    save_evaluation(CONFIG, 2, data)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("suffix", [".jsonl", ".pt"])
def test_dump_overwrites_only_a_dump(tmp_path, suffix):
    path = tmp_path / f"0{suffix}"
    for _ in range(2):
        write_dump(path, 0, leaves(make_groups()), CONFIG)
    path.write_text('{"input": "my prompts"}\n')
    with pytest.raises(UserError, match=rf"would overwrite .*0\{suffix}, which no run wrote"):
        write_dump(path, 0, leaves(make_groups()), CONFIG)
    assert path.read_text() == '{"input": "my prompts"}\n'


def test_train_dump_overwrites_only_a_dump(tmp_path):
    template = str(tmp_path / "{rollout_id}.jsonl")
    for _ in range(2):
        path = write_train_dump(template, 3, [[{"sample_indices": 0}]])
    path.write_text("mine")
    with pytest.raises(UserError, match=r"3\.jsonl exists and was not written by a run"):
        write_train_dump(template, 3, [[{"sample_indices": 0}]])
    assert path.read_text() == "mine"
