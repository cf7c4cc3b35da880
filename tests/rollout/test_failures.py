"""Failures of user functions are outcomes of their samples: the run, deadlines and other samples are unaffected."""

import asyncio
import gc
import threading

import pytest

from slime.config import Config
from slime.data.sample import Sample
from slime.rollout.dispatcher import Dispatcher
from slime.rollout.event_loop import LoopThread
from slime.rollout.gate import Gate, SampleClock, SampleTimeout
from slime.rollout.outcomes import leaves
from slime.rollout.rewards.hub import RewardHub
from slime.rollout.rewards.worker_pool import RewardError
from slime.rollout.sglang_rollout import generate_rollout
from tests.rollout.clocks import ClockAhead

STATUS = Sample.Status
ENDINGS = {
    "exit": ("import sys; sys.exit(3)", "called sys.exit(3)"),
    "cancelled": ("raise asyncio.CancelledError", "let a CancelledError out although its task was not cancelled"),
}
GENERATE = """
import asyncio
from slime.rollout.sglang_rollout import generate
async def f(args, sample, sampling_params):
    sample = await generate(args, sample, sampling_params)
    if sample.index == 1:
        {ending}
    return sample
"""
HOOK = "import asyncio\nasync def f(args, sample):\n    if sample.index == 1:\n        {ending}\n"
REWARD = "import asyncio\n{kind} f(args, sample):\n    if sample.index == 1:\n        {ending}\n    return 1.0\n"


@pytest.mark.parametrize("how", list(ENDINGS))
@pytest.mark.parametrize("where", ["generate", "hook", "reward", "plain reward"])
def test_plugin_that_exits_or_cancels_fails_one_sample(engine, make_runtime, prompts, write_plugin, where, how):
    ending, told = ENDINGS[how]
    flags = {
        "generate": {"custom_generate_function_path": GENERATE.format(ending=ending), "rm_type": "random"},
        "hook": {"rollout_sample_hook_path": HOOK.format(ending=ending), "rm_type": "random"},
        "reward": {"custom_rm_path": REWARD.format(kind="async def", ending=ending)},
        "plain reward": {"custom_rm_path": REWARD.format(kind="def", ending=ending)},
    }[where]
    flags = {name: write_plugin(value) if name.endswith("path") else value for name, value in flags.items()}
    if where == "hook":
        flags["rollout_sample_hook_path"] = [flags["rollout_sample_hook_path"]]
    samples = list(
        leaves(generate_rollout(make_runtime([engine.url], **flags).args, 0, prompts(["a", "b"], n=2)).samples)
    )
    assert samples[1].failure.startswith(f"{where.removeprefix('plain ')}: Leaked: ")
    assert samples[1].failure.endswith(told)
    assert [sample.status for sample in samples] == [
        STATUS.COMPLETED,
        STATUS.FAILED,
        STATUS.COMPLETED,
        STATUS.COMPLETED,
    ]


def test_generate_task_can_be_cancelled(engine, make_runtime, prompts, write_plugin):
    """The task must end with CancelledError, because cancelling a rollout waits for its tasks."""
    begun = threading.Event()

    async def held(body):
        begun.set()
        return await engine.held("7")

    engine.respond = held
    runtime = make_runtime([engine.url], custom_generate_function_path=write_plugin(GENERATE.format(ending="pass")))
    [group] = prompts(["a"], n=1).groups

    async def cancelled():
        [task] = runtime.state.submit_generate_tasks([group])
        await asyncio.to_thread(begun.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    runtime.run(cancelled(), 120)


ABORTS = """
from slime.rollout.sglang_rollout import generate
async def f(args, sample, sampling_params):
    calls = sample.metadata["calls"] = sample.metadata.get("calls", 0) + 1
    if calls <= args.carried["aborts"]:
        sample.tokens, sample.status = [5], sample.Status.ABORTED
        return sample
    return await generate(args, sample, sampling_params)
"""


@pytest.fixture
def no_pause(monkeypatch):
    monkeypatch.setattr("slime.rollout.sample_pipeline.FIRST_PAUSE_S", 0.0)


def test_sample_aborted_by_a_custom_function_is_restarted(engine, make_runtime, prompts, write_plugin, no_pause):
    flags = {"custom_generate_function_path": write_plugin(ABORTS), "rm_type": "random"}
    runtime = make_runtime([engine.url], carried={"aborts": 3}, **flags)
    samples = list(leaves(generate_rollout(runtime.args, 0, prompts(["a", "b"], n=2)).samples))
    assert [(s.status, s.metadata["calls"], s.response_length) for s in samples] == [(STATUS.COMPLETED, 4, 2)] * 4


def test_function_that_always_aborts_fails_its_sample(engine, make_runtime, prompts, write_plugin, no_pause):
    """Continuous generation must not call it again without limit."""
    only_one = ABORTS.replace("if calls <=", "if sample.index == 1 and calls <=")
    flags = {"custom_generate_function_path": write_plugin(only_one), "rm_type": "random"}
    runtime = make_runtime([engine.url], carried={"aborts": 10**6}, async_mode="full", max_weight_staleness=0, **flags)

    async def taken():
        continuous = Dispatcher(runtime, prompts(["a", "b"], n=2), 0)
        await continuous.start(total=1, version=0)
        try:
            return await continuous.take(0)
        finally:
            await continuous.aclose()

    bad = list(leaves(runtime.run(taken(), 120).samples))[1]
    assert bad.failure.startswith("generate: AbortedTooOften: ")
    assert (bad.status, bad.metadata["calls"]) == (STATUS.FAILED, 16)


def test_aborted_sibling_fails_and_finished_siblings_are_kept(engine, make_runtime, prompts, write_plugin):
    fan_out = (
        "import copy\nfrom slime.rollout.sglang_rollout import generate\n"
        "async def f(args, sample, sampling_params):\n"
        "    cut = copy.deepcopy(sample)\n    cut.status = sample.Status.ABORTED\n"
        "    return [await generate(args, sample, sampling_params), cut]\n"
    )
    runtime = make_runtime([engine.url], rm_type="random", custom_generate_function_path=write_plugin(fan_out))
    samples = list(leaves(generate_rollout(runtime.args, 0, prompts(["a", "b"], n=2)).samples))
    assert [sample.status for sample in samples] == [STATUS.COMPLETED, STATUS.FAILED] * 4


@pytest.mark.parametrize("group_rm", [False, True])
def test_reward_function_that_aborts_a_sample_fails_it(engine, make_runtime, prompts, write_plugin, group_rm):
    abort = "    if {0}.index == 1:\n        {0}.status = {0}.Status.ABORTED\n"
    one = "async def f(args, sample):\n" + abort.format("sample") + "    return 1.0\n"
    many = "async def f(args, samples):\n    bad = samples[1]\n" + abort.format("bad") + "    return [1.0] * 2\n"
    runtime = make_runtime([engine.url], custom_rm_path=write_plugin(many if group_rm else one), group_rm=group_rm)
    samples = list(leaves(generate_rollout(runtime.args, 0, prompts(["a", "b"], n=2)).samples))
    assert [(sample.status, sample.reward) for sample in samples] == [
        (STATUS.COMPLETED, 1.0),
        (STATUS.FAILED, None),
        (STATUS.COMPLETED, 1.0),
        (STATUS.COMPLETED, 1.0),
    ]
    assert samples[1].failure.startswith("reward: ValueError: a reward function must not abort a sample")


def test_hooks_count_against_the_sample_deadline(engine, make_runtime, prompts, write_plugin):
    hook = (
        "import asyncio\nasync def f(args, sample):\n    if sample.index == 1:\n        await asyncio.Event().wait()\n"
    )
    path = write_plugin(hook)
    for seconds in (1.0, 10.0, 60.0):  # retry with a longer deadline if the others did not finish
        flags = {"rollout_sample_hook_path": [path], "rollout_sample_timeout": seconds}
        runtime = make_runtime([engine.url], rm_type="random", **flags)
        samples = list(leaves(generate_rollout(runtime.args, 0, prompts(["a", "b"], n=2)).samples))
        told = f"hook: SampleTimeout: {path} did not end within {seconds:g} s (--rollout-sample-timeout)"
        if (failures := [sample.failure for sample in samples]) == [None, told, None, None]:
            return
    raise AssertionError(failures)


BLOCKING = """
import threading
together, late, written = threading.Barrier(4), threading.Event(), threading.Event()

def sampled(sample):
    sample.tokens = [5]
    sample.append_response_tokens(tokens=[7], log_probs=[-1.0], text="7")
    sample.status = sample.Status.COMPLETED

def meet(args, sample):
    together.wait(args.carried["seconds"])

def hang(args, sample):
    if sample.index == 1:
        late.wait(240)
        sample.status, sample.remove_sample, sample.reward = sample.Status.COMPLETED, False, 1.0
        written.set()

async def plain(args, sample, sampling_params):
    sampled(sample)
    return sample

def generate_meet(args, sample, sampling_params):
    meet(args, sample)
    sampled(sample)
    return sample

def list_meet(args, samples):
    meet(args, samples[0])
    sampled(samples[0])

def generate_hang(args, sample, sampling_params):
    hang(args, sample)
    sampled(sample)
    return sample

def reward(args, sample):
    return 0.5

def reward_meet(args, sample):
    meet(args, sample)
    sample.metadata["judged"] = sample.train_metadata = {"by": "reward_meet"}
    return 0.5

def reward_hang(args, sample):
    hang(args, sample)
    return 0.5
"""


def blocking_flags(write_plugin, stage, kind):
    """Return the path of a function that blocks in one stage, and the flags of a rollout that uses it."""
    file = write_plugin(BLOCKING, f"blocking_{stage}_{kind}").removesuffix(":f")
    own = {"generate": f"{file}:generate_{kind}", "list": f"{file}:list_{kind}", "reward": f"{file}:reward_{kind}"}
    path = own.get(stage, f"{file}:{kind}")
    flags = {
        "custom_generate_function_path": path if stage in ("generate", "list") else f"{file}:plain",
        "rollout_sample_hook_path": [path] if stage == "hook" else [],
        "custom_rm_path": path if stage == "reward" else f"{file}:reward",
    }
    return path, flags


@pytest.mark.parametrize("stage", ["generate", "list", "hook", "reward"])
def test_sync_functions_of_several_samples_run_concurrently(engine, make_runtime, prompts, write_plugin, stage):
    _, flags = blocking_flags(write_plugin, stage, "meet")
    runtime = make_runtime([engine.url], carried={"seconds": 120.0}, **flags)
    samples = list(leaves(generate_rollout(runtime.args, 0, prompts(["a", "b"], n=2)).samples))
    assert [(sample.failure, sample.reward) for sample in samples] == [(None, 0.5)] * 4
    if stage == "reward":
        assert all(sample.metadata["judged"] == sample.train_metadata == {"by": "reward_meet"} for sample in samples)


@pytest.mark.parametrize("stage", ["generate", "hook", "reward"])
def test_sync_function_that_hangs_fails_its_sample_and_cannot_change_it(
    engine, make_runtime, prompts, write_plugin, stage
):
    path, flags = blocking_flags(write_plugin, stage, "hang")
    for seconds in (1.0, 10.0, 60.0):  # retry with a longer deadline if the others did not finish
        limits = {"rollout_sample_timeout": seconds, "reward_timeout": seconds}
        runtime = make_runtime([engine.url], **flags, **limits)
        samples = list(leaves(generate_rollout(runtime.args, 0, prompts(["a", "b"], n=2)).samples))
        if [sample.failure is None for sample in samples] == [True, False, True, True]:
            break
    assert path in samples[1].failure
    assert f"within {seconds:g} s" in samples[1].failure
    plugin = runtime.function(path.rpartition(":")[0] + ":hang", flag="--rollout-sample-hook-path", params=("a", "b"))
    plugin.__globals__["late"].set()
    assert plugin.__globals__["written"].wait(120)
    assert (samples[1].status, samples[1].remove_sample, samples[1].reward) == (STATUS.FAILED, True, None)


def test_blocking_filters_and_sources_do_not_block_generation(engine, make_runtime, prompts, write_plugin):
    """The first filter call returns only after another sample has been generated."""
    plugin = (
        "import threading\nfrom slime.rollout.sglang_rollout import generate\n"
        "judging, generated = threading.Event(), threading.Event()\n"
        "async def f(args, sample, sampling_params):\n"
        "    while sample.group_index == 1 and not judging.is_set():\n        await asyncio.sleep(0.005)\n"
        "    sample = await generate(args, sample, sampling_params)\n"
        "    if sample.group_index == 1:\n        generated.set()\n"
        "    return sample\n"
        "def keep(args, samples):\n    judging.set()\n    return generated.wait(120)\n"
        "def see(args, groups, source=None):\n    assert threading.current_thread().name == 'plugin'\n"
        "import asyncio\n"
    )
    path = write_plugin(plugin)
    file = path.removesuffix(":f")
    source = prompts(["a", "b"], n=2)
    threads = []
    get_samples = source.get_samples
    source.get_samples = lambda count: threads.append(threading.current_thread().name) or get_samples(count)
    runtime = make_runtime(
        [engine.url],
        rm_type="random",
        custom_generate_function_path=path,
        dynamic_sampling_filter_path=f"{file}:keep",
        rollout_sample_filter_path=f"{file}:see",
        rollout_all_samples_process_path=f"{file}:see",
    )
    assert len(list(leaves(generate_rollout(runtime.args, 0, source).samples))) == 4
    assert set(threads) == {"plugin"}


def test_sample_deadline_resumes_after_a_cancelled_wait_at_the_gate(make_runtime):
    async def main():
        gate = Gate(asyncio.Semaphore(2))
        gate.close()

        async def sample():
            async with SampleClock(0.1).running("f"):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(gate.pass_through(), 0.01)  # a timeout set by the function itself
                await asyncio.Event().wait()

        with pytest.raises(SampleTimeout):
            await asyncio.wait_for(sample(), 120)

    asyncio.run(main())


def test_sample_clock_pauses_until_the_last_request_passes_its_gate():
    async def main():
        gate, other, clock = Gate(asyncio.Semaphore(4)), Gate(asyncio.Semaphore(4)), ClockAhead()
        gate.close()
        other.close()

        async def sample():
            async with SampleClock(60).running("f"):
                await asyncio.gather(gate.pass_through(), other.pass_through())

        task = asyncio.create_task(sample())
        await clock.put_forward(0)  # lets both requests reach their gates
        gate.open()
        await clock.put_forward(1000)
        other.open()
        await task

    asyncio.run(main())


def test_queue_time_does_not_count_against_reward_timeout():
    """The only worker thread is busy for longer than the deadline of a comparison."""
    sample = Sample(index=0, response=r"\boxed{\frac{1}{2}}", label="0.5", status=STATUS.COMPLETED)

    async def main(hub, seconds):
        assert await hub.score(sample) == 1.0  # starts the worker
        release = threading.Event()
        busy = hub._verifier.pool._threads.submit(release.wait)
        scored = asyncio.create_task(hub.score(sample))
        await asyncio.sleep(1.5 * seconds)
        release.set()
        assert busy.result()
        return await scored

    for seconds in (1.0, 5.0, 25.0):  # retry with a longer deadline if the comparison itself was slow
        hub = RewardHub(Config(rm_type="math", reward_timeout=seconds, reward_workers=1))
        try:
            assert asyncio.run(main(hub, seconds)) == 1.0
            return
        except RewardError as late:
            error = late
        finally:
            hub.close()
    raise error


def test_reward_error_fails_only_one_sibling(engine, make_runtime, prompts, write_plugin):
    fan_out = (
        "import copy\nfrom slime.rollout.sglang_rollout import generate\n"
        "async def f(args, sample, sampling_params):\n"
        "    sample = await generate(args, sample, sampling_params)\n"
        "    other = copy.deepcopy(sample)\n    other.metadata['bad'] = True\n    return [sample, other]\n"
    )
    reward = "def f(args, sample):\n    if 'bad' in sample.metadata:\n        raise OSError('judge')\n    return 1.0\n"
    runtime = make_runtime(
        [engine.url],
        custom_generate_function_path=write_plugin(fan_out, "fan"),
        custom_rm_path=write_plugin(reward, "reward"),
    )
    samples = list(leaves(generate_rollout(runtime.args, 0, prompts(["a", "b"], n=2)).samples))
    assert [(s.reward, s.failure) for s in samples] == [(1.0, None), (None, "reward: OSError: judge")] * 4


def test_error_of_a_cancelled_reward_call_is_not_reported():
    """Another group with an invalid reward may end the rollout while this call is running."""
    begun, release, threads, complaints = threading.Event(), threading.Event(), [], []

    def judge(args, sample):
        threads.append(threading.current_thread())
        begun.set()
        release.wait()
        raise ValueError("too late")

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context["message"]))
        hub = RewardHub(Config(), judge)
        scored = asyncio.create_task(hub.score(Sample(index=0, status=STATUS.COMPLETED)))
        await asyncio.to_thread(begun.wait)
        [job] = hub._threads._running
        scored.cancel()
        with pytest.raises(asyncio.CancelledError):
            await scored
        release.set()
        with pytest.raises(ValueError, match="too late"):
            await asyncio.to_thread(job.result)
        await asyncio.to_thread(threads[0].join)  # its callbacks are queued on the loop after this
        del scored, job
        gc.collect()

    asyncio.run(main())
    gc.collect()
    assert complaints == []


def test_system_exit_in_a_task_does_not_stop_the_event_loop():
    async def exits():
        raise SystemExit(3)

    async def answers():
        return 5

    loop = LoopThread("exits")
    with pytest.raises(SystemExit):
        loop.run(exits(), 120)
    assert loop.run(answers(), 120) == 5
    loop.close()
