"""What functions of the user hand back: whose it is, and whether it can be trusted."""

import pytest

from slime.data.journal import JournaledSource
from slime.data.sample import Sample
from slime.rollout.sglang_rollout import generate_rollout
from slime.rollout.types import leaves
from slime.train.batch import flatten_samples, make_train_batch
from tests.data.journal_samples import open_journal

NEW_SAMPLES = """
from slime.utils.types import Sample
async def f(args, sample, sampling_params):
    made = []
    for turn in range(args.carried["turns"]):
        made.append(Sample(tokens=[5, 6, 7 + sample.index], response_length=2, response="7",
                           rollout_log_probs=[-0.5, -0.25], rollout_id=100 + turn, group_index=200 + turn,
                           index=300 + turn, status=Sample.Status.COMPLETED))
    return made if args.carried["turns"] > 1 else made[0]
"""
REWARD_OF_PARITY = "def f(args, sample):\n    assert sample.label == 'label'\n    return float(sample.index % 2)\n"


@pytest.mark.parametrize("turns", [1, 3])
def test_new_samples_belong_to_the_one_that_was_dispatched(
    make_runtime, prompts, write_plugin, engine, tmp_path, turns
):
    """Their ids are given to them, so that rewards are compared within the group and a rollout counts once."""
    runtime = make_runtime(
        [engine.url],
        custom_generate_function_path=write_plugin(NEW_SAMPLES, "new"),
        custom_rm_path=write_plugin(REWARD_OF_PARITY, "reward"),
        carried={"turns": turns},
    )
    source = prompts(["a", "b"], n=2, labels=["label", "label"])
    runtime.journal = open_journal(tmp_path)
    output = generate_rollout(runtime.args, 0, JournaledSource(source, runtime.journal))
    samples = list(leaves(output.samples))
    assert [sample.group_index for sample in samples] == [0] * 2 * turns + [1] * 2 * turns
    assert [sample.index for sample in samples] == [index for index in range(4) for _ in range(turns)]
    shared = [index for index in range(4) for _ in range(turns)] if turns > 1 else [None] * 4
    assert [sample.rollout_id for sample in samples] == shared
    assert {(sample.prompt, sample.label) for sample in samples} == {("a", "label"), ("b", "label")}
    assert len({sample.session_id for sample in samples}) == 4
    batch = make_train_batch(runtime.args, flatten_samples(output.samples))
    assert [reward > 0 for reward in batch.rewards] == [index % 2 == 1 for index in range(4) for _ in range(turns)]
    assert len(set(batch.rollout_ids)) == 4
    runtime.journal.assign(0, output.samples, {})
    assert runtime.journal.batch(0)[0] == output.samples
    assert len({sample.journal_id for sample in samples}) == len(samples)


def test_a_hook_may_hand_back_another_sample(make_runtime, prompts, write_plugin, engine):
    hook = (
        "from slime.utils.types import Sample\n"
        "def f(args, sample):\n"
        "    return Sample(tokens=[1, 2], response_length=1, response='x', status=sample.status, index=70)\n"
    )
    runtime = make_runtime([engine.url], rm_type="random", rollout_sample_hook_path=[write_plugin(hook)])
    samples = list(leaves(generate_rollout(runtime.args, 0, prompts(["a", "b"], n=2)).samples))
    assert [(s.group_index, s.index, s.prompt, s.response) for s in samples] == [
        (0, 0, "a", "x"),
        (0, 1, "a", "x"),
        (1, 2, "b", "x"),
        (1, 3, "b", "x"),
    ]


def test_one_sample_handed_back_twice_is_two(make_runtime, prompts, write_plugin, engine):
    twice = (
        "from slime.rollout.sglang_rollout import generate\n"
        "async def f(args, sample, sampling_params):\n"
        "    sample = await generate(args, sample, sampling_params)\n    return [sample, sample]\n"
    )
    runtime = make_runtime(
        [engine.url], rm_type="random", custom_generate_function_path=write_plugin(twice), n_samples_per_prompt=1
    )
    for [[first, second]] in generate_rollout(runtime.args, 0, prompts(["a", "b"], n=1)).samples:
        assert first is not second
        assert first.tokens == second.tokens
        assert first.rollout_id == second.rollout_id == first.index
        assert first.status is Sample.Status.COMPLETED
