"""Rollout progress: counts of running and finished samples, and the progress line."""

from __future__ import annotations

import asyncio
from typing import Any

from slime.rollout.progress import ProgressSnapshot, SampleProgress
from slime.rollout.sglang_rollout import generate_rollout


def test_pulse_counts_running_and_finished_samples() -> None:
    now = [100.0]
    pulse = SampleProgress(now=lambda: now[0])
    with pulse.sample():
        assert pulse.look() is None  # no rollout has begun
    pulse.begin(wanted=4)
    assert pulse.look() is None  # no samples in flight yet
    with pulse.sample():
        now[0] = 102.0
        with pulse.sample():
            now[0] = 105.0
            assert pulse.look() == ProgressSnapshot(
                done=0, wanted=4, under_way=2, judged=0, tokens_per_s=0.0, oldest_s=5.0
            )
        pulse.finished(tokens=20)
        now[0] = 110.0
        assert pulse.look() == ProgressSnapshot(
            done=1, wanted=4, under_way=1, judged=0, tokens_per_s=2.0, oldest_s=10.0
        )
        assert pulse.sentence() == "1/4 samples, 2 tok/s, longest running 10 s"
        assert pulse.sentence(tokens_per_s=1234.5) == "1/4 samples, 1,234 tok/s, longest running 10 s"
    pulse.subtract_discarded(1)
    assert pulse.sentence() is None
    pulse.begin(wanted=4, done=3)
    assert pulse.sentence(7) == "3/4 samples, 7 tok/s"
    pulse.finished(tokens=1)
    pulse.finished(tokens=1)
    assert pulse.sentence(7) == "4/4 samples, 7 tok/s"  # capped at the target when over-sampling
    pulse.end()
    assert pulse.look() is None


def test_progress_line_counts_samples_waiting_for_a_reward() -> None:
    now = [0.0]
    pulse = SampleProgress(now=lambda: now[0])
    pulse.begin(wanted=4)
    with pulse.judging(), pulse.judging():
        now[0] = 3.0
        with pulse.sample():
            assert pulse.sentence(0) == "0/4 samples, 0 tok/s, 2 waiting for a reward, longest running 3 s"
    assert pulse.sentence() is None


def test_progress_line_without_a_target_shows_the_finished_count() -> None:
    pulse = SampleProgress(now=lambda: 100.0)
    pulse.begin(wanted=0)
    pulse.finished(tokens=5)
    assert pulse.sentence(7) == "1 samples, 7 tok/s"


def test_oldest_running_sample_is_found_when_samples_end_out_of_order() -> None:
    now = [100.0]
    pulse = SampleProgress(now=lambda: now[0])
    pulse.begin(wanted=3)
    first, second, third = pulse.sample(), pulse.sample(), pulse.sample()
    for start, sample in ((101.0, first), (102.0, second), (103.0, third)):
        now[0] = start
        sample.__enter__()
    first.__exit__(None, None, None)
    now[0] = 110.0
    beat = pulse.look()
    assert beat is not None
    assert (beat.under_way, beat.oldest_s) == (2, 8.0)
    third.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert pulse.look() is None


def test_rollout_and_evaluation_have_separate_pulses(
    engine: Any, make_runtime: Any, prompts: Any, tmp_path: Any
) -> None:
    (tmp_path / "eval.jsonl").write_text('{"input": "e"}\n' * 3)
    runtime = make_runtime([engine.url], rm_type="random", eval_prompt_data=[("e", str(tmp_path / "eval.jsonl"))])
    seen: dict[str, tuple[ProgressSnapshot | None, ProgressSnapshot | None]] = {}

    async def answer() -> str:
        await asyncio.sleep(0)
        return "77</s>"

    def respond(body: dict[str, Any]) -> Any:
        text = runtime.tokenizer.decode(body["input_ids"])
        seen[text] = (runtime.pulse.look(), runtime.eval_pulse.look())
        return answer()

    engine.respond = respond
    with runtime.pulse.during(4):
        generate_rollout(runtime.args, 0, prompts(["a", "b"], n=2))
        training, evaluating = seen["a"]
        assert (training.wanted, evaluating) == (4, None) if training is not None else False
        beat = runtime.pulse.look()
        assert beat is not None
        assert (beat.done, beat.under_way) == (4, 0)
    generate_rollout(runtime.args, 0, None, evaluation=True)
    training, evaluating = seen["e"]
    assert training is None
    assert evaluating is not None
    assert evaluating.wanted == 3
    assert runtime.eval_pulse.look() is None
