"""Results of user functions: their assignment to dispatched samples, and their validation."""

from contextlib import nullcontext

import pytest

from slime.data.buffer import JournaledSource
from slime.data.sample import Sample
from slime.errors import UserError
from slime.rollout.outcomes import RolloutFailed, leaves
from slime.rollout.pipeline import RolloutMaker
from slime.rollout.sglang_rollout import generate_rollout
from slime.train.samples.batch import flatten_samples, make_train_batch
from tests.data.journal_samples import open_journal, statements

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
def test_returned_samples_inherit_ids_of_the_dispatched_sample(
    make_runtime, prompts, write_plugin, engine, tmp_path, turns
):
    """Ids are copied, so that rewards are compared within the group and a rollout counts once."""
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
    with statements(runtime.journal) as written:
        runtime.journal.assign(0, output.samples, {})
    assert written == []  # unchanged since they were recorded
    assert runtime.journal.batch(0)[0] == output.samples
    assert len({sample.journal_id for sample in samples}) == len(samples)


GIVES_UP_ONCE = """
from slime.utils.types import Sample
SEEN = []
async def f(args, sample, sampling_params):
    SEEN.append((sample.prompt, sample.response_length, sample.reward))
    with open(args.seen, "w") as file:
        file.write(repr(sorted(SEEN)))
    status = "completed" if SEEN.count(SEEN[-1]) > 1 else "aborted"
    return Sample(index=77, prompt="task " + sample.prompt, tokens=[5, 6, 7], response_length=2, response="7",
                  reward=0.5, status=status, loss_mask=[1, 1])
"""


def test_retry_after_an_aborted_new_sample_gets_the_original_sample(
    make_runtime, prompts, write_plugin, engine, tmp_path
):
    """The new sample has another prompt, unknown to the function. A status may be given as its value."""
    path, seen = write_plugin(GIVES_UP_ONCE, "up"), tmp_path / "seen"
    runtime = make_runtime([engine.url], custom_generate_function_path=path, carried={"seen": str(seen)})
    [one, two] = leaves(generate_rollout(runtime.args, 0, prompts(["1", "2"], n=1)).samples)
    assert seen.read_text() == repr([("1", 0, None)] * 2 + [("2", 0, None)] * 2)
    assert [(s.index, s.prompt, s.reward, s.status) for s in (one, two)] == [
        (0, "task 1", 0.5, Sample.Status.COMPLETED),
        (1, "task 2", 0.5, Sample.Status.COMPLETED),
    ]


def test_hook_may_return_another_sample(make_runtime, prompts, write_plugin, engine):
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


def test_sample_returned_twice_is_copied(make_runtime, prompts, write_plugin, engine):
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


CACHES = """
from slime.utils.types import Sample
kept = []

def made(sample):
    if not kept:
        kept.append(Sample(tokens=[5, 6], response_length=1, response="7", rollout_log_probs=[-0.5],
                           status=Sample.Status.COMPLETED))
    return kept[0]

async def generate(args, sample, sampling_params):
    return made(sample)

async def fan_out(args, sample, sampling_params):
    return [Sample(tokens=[5, 6], response_length=1, response="7", rollout_log_probs=[-0.5],
                   status=Sample.Status.COMPLETED), made(sample)]

async def plain(args, sample, sampling_params):
    sample.tokens = [5]
    sample.append_response_tokens(tokens=[7], log_probs=[-1.0], text="7")
    sample.status = sample.Status.COMPLETED
    return sample

async def hook(args, sample):
    kept.append(sample)
    return kept[0]
"""


@pytest.mark.parametrize("kind", ["generate", "fan_out", "hook"])
def test_object_returned_for_several_samples_fails_all_but_the_first(make_runtime, prompts, write_plugin, engine, kind):
    """The other samples fail without changing the object; the next rollout cannot use it either."""
    file = write_plugin(CACHES, f"caches_{kind}").removesuffix(":f")
    path = f"{file}:{kind}"
    generate, hooks = (f"{file}:plain", [path]) if kind == "hook" else (path, [])
    runtime = make_runtime(
        [engine.url], rm_type="random", custom_generate_function_path=generate, rollout_sample_hook_path=hooks
    )
    groups = generate_rollout(runtime.args, 0, prompts(["a", "b"], n=2)).samples
    samples = [next(leaves([member])) for group in groups for member in group]
    assert [(sample.group_index, sample.index) for sample in samples] == [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert len({id(sample) for sample in samples}) == 4
    assert samples[0].status is Sample.Status.COMPLETED
    stage = "hook" if kind == "hook" else "generate"
    for sample in samples[1:]:
        assert sample.status is Sample.Status.FAILED
        assert sample.failure.startswith(f"{stage}: SampleTaken: {path} returned for sample {sample.index} an object ")
        assert "is already sample 0 of group 0" in sample.failure
    if kind == "generate":
        with pytest.raises(RolloutFailed, match="is already sample 0 of group 0"):
            generate_rollout(runtime.args, 1, prompts(["c", "d"], n=2))


@pytest.mark.parametrize("which", ["kept[0]", "ahead.pop(sample.response, sample)"])
def test_hook_that_returns_another_sibling_fails_that_sample(make_runtime, prompts, write_plugin, engine, which):
    """The sibling would be trained on twice, whether or not it has passed the hook."""
    hook = f"""
from slime.utils.types import Sample
kept, ahead = [], {{}}

async def fan_out(args, sample, sampling_params):
    siblings = [Sample(tokens=[5, 6], response_length=1, response=text, rollout_log_probs=[-0.5],
                       status=Sample.Status.COMPLETED) for text in "xy"]
    ahead["x"] = siblings[1]
    return siblings

async def hook(args, sample):
    kept.append(sample)
    return {which}
"""
    file = write_plugin(hook, f"siblings_{which[0]}").removesuffix(":f")
    flags = {"custom_generate_function_path": f"{file}:fan_out", "rollout_sample_hook_path": [f"{file}:hook"]}
    runtime = make_runtime([engine.url], rm_type="random", n_samples_per_prompt=1, **flags)
    [[siblings]] = generate_rollout(runtime.args, 0, prompts(["a"], n=1)).samples
    assert [sample.response for sample in siblings] == ["x", "y"]
    good, failed = siblings if which == "kept[0]" else reversed(siblings)
    assert (good.status, failed.status) == (Sample.Status.COMPLETED, Sample.Status.FAILED)
    assert failed.failure == (
        f"hook: SampleTaken: {file}:hook returned for sample 0 an object that is already another sample of its "
        "fan-out: return the sample it was given, or a copy.deepcopy of a result that it keeps"
    )


@pytest.mark.parametrize("how", ["del groups[0]", "groups[0].clear()"])
def test_groups_removed_by_a_sample_filter_stay_removed_after_recovery(
    make_runtime, prompts, write_plugin, engine, tmp_path, how
):
    path = write_plugin(f"def f(args, groups):\n    {how}\n    groups[-1].pop()\n")
    runtime = make_runtime([engine.url], rm_type="random", rollout_sample_filter_path=path)
    runtime.journal = open_journal(tmp_path)
    source = JournaledSource(prompts(["a", "b"], n=2), runtime.journal)
    output = generate_rollout(runtime.args, 0, source)
    assert [sample.index for sample in leaves(output.samples)] == [2]
    assert output.metrics["rollout/removed_groups"] == 1.0
    runtime.journal.assign(0, output.samples, {})
    recovered = runtime.journal.recover(0)
    assert (recovered.batches, recovered.groups) == ([0], [])
    assert [sample.index for sample in leaves(runtime.journal.batch(0)[0])] == [2]
    runtime.journal.close()


def test_sample_filter_that_removes_all_groups_fails_the_rollout(make_runtime, prompts, write_plugin, engine):
    path = write_plugin("def f(args, groups):\n    groups.clear()\n")
    runtime = make_runtime([engine.url], rm_type="random", rollout_sample_filter_path=path)
    with pytest.raises(RolloutFailed, match=r"--rollout-sample-filter-path .*:f removed all 2 groups"):
        generate_rollout(runtime.args, 0, prompts(["a", "b"], n=2))


BROKEN = """
from slime.rollout.sglang_rollout import generate
BREAK = {
    "mask": lambda s: setattr(s, "loss_mask", [1]),
    "log-probs": lambda s: s.rollout_log_probs.append(-1.0),
    "infinite": lambda s: s.rollout_log_probs.__setitem__(0, float("-inf")),
    "length": lambda s: setattr(s, "response_length", 99),
    "no prompt": lambda s: setattr(s, "tokens", s.tokens[1:]),
    "ids": lambda s: setattr(s, "tokens", [0.5, *s.tokens[1:]]),
    "texts": lambda s: setattr(s, "tokens", ["a", "b", "c"]),
    "none": lambda s: setattr(s, "tokens", None),
    "vocabulary": lambda s: setattr(s, "tokens", [10**6, *s.tokens[1:]]),
    "metadata": lambda s: setattr(s, "metadata", None),
    "response": lambda s: setattr(s, "response", None),
    "status": lambda s: setattr(s, "status", "finished"),
    "versions": lambda s: setattr(s, "version_spans", [1, 2]),
}
async def f(args, sample, sampling_params):
    sample = await generate(args, sample, sampling_params)
    if sample.index == 1:
        BREAK[args.carried["how"]](sample)
    return sample
def hook(args, sample):
    if sample.index == 1:
        BREAK[args.carried["how"]](sample)
def reward(args, sample):
    if sample.index == 1:
        BREAK[args.carried["how"]](sample)
    return 1.0
"""
CAUSES = {
    "mask": "loss_mask has 1 entries for 2 response tokens",
    "log-probs": "rollout_log_probs has 3 entries for 2 response tokens",
    "infinite": "rollout_log_probs[0] is -inf: it must be finite",
    "length": "response_length is 99, but there are 3 tokens",
    "no prompt": "all 2 tokens are the response: it needs at least one token of a prompt before it",
    "ids": "tokens must be a list of whole numbers",
    "texts": "tokens must be a list of whole numbers",
    "none": "tokens is None: it must be a list of token ids",
    "vocabulary": "tokens has 1000000, which is not a token id: the vocabulary has 200 ids",
    "metadata": "metadata is None, expected dict",
    "response": "response is None, expected str",
    "status": "status is 'finished', expected samplestatus",
    "versions": "version_spans has 1, expected [version, number of tokens]",
}


@pytest.mark.parametrize(
    ("stage", "how"), [("generate", how) for how in CAUSES] + [("hook", "mask"), ("reward", "log-probs")]
)
def test_inconsistent_sample_fails_alone_and_is_journaled_as_failed(
    make_runtime, prompts, write_plugin, engine, tmp_path, stage, how
):
    path = write_plugin(BROKEN).removesuffix(":f")
    flags = {
        "generate": {"custom_generate_function_path": f"{path}:f", "rm_type": "random"},
        "hook": {"rollout_sample_hook_path": [f"{path}:hook"], "rm_type": "random"},
        "reward": {"custom_rm_path": f"{path}:reward"},
    }[stage]
    runtime = make_runtime([engine.url], carried={"how": how}, **flags)
    runtime.journal = open_journal(tmp_path)
    source = JournaledSource(prompts(["a", "b"], n=2), runtime.journal)
    samples = list(leaves(generate_rollout(runtime.args, 0, source).samples))
    bad = samples.pop(1)
    assert bad.failure == f"{stage}: BadSample: {CAUSES[how]}"
    assert (bad.status, bad.response_length, bad.loss_mask) == (Sample.Status.FAILED, 0, None)
    assert [sample.status for sample in samples] == [Sample.Status.COMPLETED] * 3
    runtime.journal.close()
    again = open_journal(tmp_path)
    recovered = list(leaves(again.recover(0).groups))
    assert [(s.index, s.failure, s.response_length) for s in recovered] == [
        (0, None, 2),
        (1, bad.failure, 0),
        (2, None, 2),
        (3, None, 2),
    ]
    again.close()


def test_invalid_fan_out_sibling_fails_alone(make_runtime, prompts, write_plugin, engine):
    fan_out = (
        "import copy\nfrom slime.rollout.sglang_rollout import generate\n"
        "async def f(args, sample, sampling_params):\n"
        "    sample = await generate(args, sample, sampling_params)\n"
        "    bad = copy.deepcopy(sample)\n    bad.loss_mask = [1, 1, 1]\n    return [sample, bad]\n"
    )
    runtime = make_runtime(
        [engine.url], rm_type="random", custom_generate_function_path=write_plugin(fan_out), n_samples_per_prompt=1
    )
    for [[good, bad]] in generate_rollout(runtime.args, 0, prompts(["a", "b"], n=1)).samples:
        assert (good.status, bad.status) == (Sample.Status.COMPLETED, Sample.Status.FAILED)
        assert good.reward is not None


def test_sample_returned_without_a_status_is_completed(make_runtime, prompts, write_plugin, engine):
    plain = (
        "async def f(args, sample, sampling_params):\n"
        "    sample.tokens, sample.response, sample.response_length = [1, 2], 'x', 1\n    return sample\n"
    )
    runtime = make_runtime([engine.url], rm_type="random", custom_generate_function_path=write_plugin(plain))
    samples = list(leaves(generate_rollout(runtime.args, 0, prompts(["a", "b"], n=2)).samples))
    assert {sample.status for sample in samples} == {Sample.Status.COMPLETED}


def test_invalid_reward_is_not_journaled(make_runtime, prompts, write_plugin, engine, tmp_path):
    own_reward = (
        "from slime.rollout.sglang_rollout import generate\n"
        "async def f(args, sample, sampling_params):\n"
        "    sample = await generate(args, sample, sampling_params)\n"
        "    sample.reward = 'good' if sample.index == 1 else 1.0\n    return sample\n"
    )
    runtime = make_runtime([engine.url], custom_generate_function_path=write_plugin(own_reward))
    runtime.journal = open_journal(tmp_path)
    source = JournaledSource(prompts(["a", "b"], n=2), runtime.journal)
    with pytest.raises(UserError, match=r"sample 1: the generate function .* gave 'good', which is not a number"):
        generate_rollout(runtime.args, 0, source)
    runtime.journal.close()
    again = open_journal(tmp_path)
    rewards = {sample.index: sample.reward for sample in leaves(again.recover(0).groups)}
    assert rewards[1] is None
    again.close()


def test_custom_rollout_samples_are_validated_before_journaling(make_runtime, tmp_path):
    """An invalid sample in the journal would be recovered again by each restart."""
    runtime = make_runtime([])
    journal = open_journal(tmp_path)

    def made(args, rollout_id, data_source, evaluation=False):
        good = Sample(index=0, tokens=[1, 2], response_length=1, reward=1.0)
        bad = Sample(index=1, tokens=[1, 2], response_length=1, loss_mask=[1, 1], reward=1.0)
        return [[good, bad]] if rollout_id == 0 else [[bad]] if rollout_id == 1 else ["text"]

    runtime.journal = journal
    maker = RolloutMaker(runtime, made, None, log=lambda *_: False, at_work=nullcontext)
    [[good, bad]] = maker.get(0).samples
    assert (good.status, good.failure) == (Sample.Status.COMPLETED, None)
    assert bad.failure == "rollout: BadSample: loss_mask has 2 entries for 1 response tokens"
    with pytest.raises(RolloutFailed, match="rollout 1: all 1 samples failed; the first one: rollout: BadSample: loss"):
        maker.get(1)
    with pytest.raises(UserError, match="must return groups, lists of Sample or of lists of them, not"):
        maker.get(2)
    assert [journal.batch(rollout_id) is not None for rollout_id in range(3)] == [True, False, False]
    journal.close()


def test_finished_samples_of_the_source_are_checked(engine, make_runtime, prompts):
    """Samples and fan-outs that an earlier run finished are not generated again, but may be invalid."""

    def finished(index, mask):
        return Sample(
            prompt="a", index=index, group_index=0, tokens=[5, 6, 7], response_length=2, loss_mask=mask, reward=1.0,
            status=Sample.Status.COMPLETED,
        )  # fmt: skip

    runtime = make_runtime([engine.url], rm_type="random", rollout_batch_size=1, n_samples_per_prompt=3)
    source = prompts(["a"], n=3)
    source.groups[0][1:] = [finished(1, [1, 1, 1]), [finished(2, [1, 0]), finished(2, [0])]]
    maker = RolloutMaker(runtime, None, source, log=lambda *_: False, at_work=nullcontext)
    [[new, alone, [good, bad]]] = maker.get(0).samples
    assert (new.failure, good.failure, good.loss_mask) == (None, None, [1, 0])
    assert alone.failure == "reward: BadSample: loss_mask has 3 entries for 2 response tokens"
    assert bad.failure == "rollout: BadSample: loss_mask has 1 entries for 2 response tokens"
    assert {alone.status, bad.status} == {Sample.Status.FAILED}
    assert len(engine.requests) == 1


def test_custom_rollout_with_repeated_or_biased_samples_is_reported(make_runtime, caplog):
    """A sample drawn from a truncated vocabulary ends the run; a repeated object is named in a warning."""

    def made(args, rollout_id, data_source, evaluation=False):
        sample = Sample(index=7, group_index=3, tokens=[1, 2], response_length=1, reward=1.0)
        sample.rollout_top_p_token_ids = [2, 5] if rollout_id == 1 else []
        sample.rollout_top_p_token_offsets = [0, len(sample.rollout_top_p_token_ids)]
        return [[sample, sample]]

    def maker(**flags):
        return RolloutMaker(make_runtime([], **flags), made, None, log=lambda *_: False, at_work=nullcontext)

    maker().get(0)
    assert "2 samples, of which only 1 are different objects (sample 7 of group 3 comes 2 times)" in caplog.text
    with pytest.raises(UserError, match=r"sample 7 has rollout_top_p_token_ids: .* --allow-biased-sampling"):
        maker().get(1)
    for accepting in ({"allow_biased_sampling": True}, {"debug_rollout_only": True}, {"loss_type": "sft_loss"}):
        assert len(maker(**accepting).get(1).samples) == 1


def test_token_id_prompt_survives_a_failure(make_runtime, prompts, write_plugin, engine):
    flaky = (
        "from slime.rollout.sglang_rollout import generate\nCALLS = []\n"
        "async def f(args, sample, sampling_params):\n"
        "    CALLS.append(sample.index)\n"
        "    if CALLS.count(0) == 1 and sample.index == 0:\n"
        "        sample.tokens, sample.response_length = [9], 1\n        raise OSError('tool')\n"
        "    return await generate(args, sample, sampling_params)\n"
    )
    runtime = make_runtime([engine.url], rm_type="random", custom_generate_function_path=write_plugin(flaky))
    source = prompts(["", ""], n=2)
    for group in source.groups:
        for sample in group:
            sample.tokens = [11, 12, 13]
    groups = generate_rollout(runtime.args, 0, source).samples
    failed = next(leaves(groups))
    assert (failed.failure, failed.tokens) == ("generate: OSError: tool", [11, 12, 13])
    source.groups = groups
    again = next(leaves(generate_rollout(runtime.args, 1, source).samples))
    assert (again.tokens[:3], again.response_length) == ([11, 12, 13], 2)
    assert {tuple(request["input_ids"]) for request in engine.requests} == {(11, 12, 13)}


def test_each_sample_gets_its_own_copy_of_sampling_params(make_runtime, prompts, write_plugin, engine):
    stopping = (
        "from slime.rollout.sglang_rollout import generate\n"
        "async def f(args, sample, sampling_params):\n"
        "    sampling_params['stop'].append(f'stop {sample.index}')\n"
        "    return await generate(args, sample, sampling_params)\n"
    )
    runtime = make_runtime(
        [engine.url], rm_type="random", custom_generate_function_path=write_plugin(stopping), rollout_stop=["x"]
    )
    generate_rollout(runtime.args, 0, prompts(["a", "b"], n=2))
    stops = sorted(request["sampling_params"]["stop"] for request in engine.requests)
    assert stops == [["x", f"stop {index}"] for index in range(4)]
    runtime.state.sampling_params["stop"].append("y")
    assert runtime.args.rollout_stop == ["x"]
