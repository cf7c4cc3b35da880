from __future__ import annotations

import io
import re
import threading

import pytest
from rich.console import Console

from slime.config import Config
from slime.observability.metric_format import figures_of, format_seconds, step_line
from slime.observability.progress import (
    QUIET_S,
    PlainProgress,
    Progress,
    RichProgress,
    StepClock,
    make_progress,
    notify_if_slow,
)
from slime.observability.summary import print_summary

METRICS = {
    "rollout/raw_reward": 0.51234,
    "train/loss": -0.01234,
    "train/grad_norm": 1.2345,
    "rollout/response_len/mean": 17.25,
    "perf/tokens_per_gpu_per_sec": 12345.6,
    "perf/step_time": 2.5,
    "train/kl_loss": 0.00123,
    "train/entropy_loss": 1.456,
    "rollout/truncated_ratio": 0.25,
    "rollout/zero_std/count": 3.0,
}
EVERYTHING = (
    "reward 0.512  loss -0.0123  grad 1.23  kl 0.0012  entropy 1.46  length 17.2  cut 25%  0-std 3  tok/s 12,346  "
    "s/step 2.50"
)


def console(terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=100, highlight=False)


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_plain_progress_prints_one_line_per_event() -> None:
    with PlainProgress(20, start=0, console=console(False)) as progress:
        progress.status("engine", "loading")
        progress.status("engine", "loading")
        progress.evaluation(0, {"math": 0.25})
        progress.step(0, METRICS)
        progress.status("rollout", "generating")
        progress.evaluation(1, {"math": 0.5, "code": 1.0})
        progress.message("saved [here]")
    lines = [line.split("] ", 1)[1] for line in text_of(progress.console).splitlines()]
    assert lines[0] == "engine: loading"
    assert lines[1] == "eval before training: math 0.250"
    step, figures = lines[2].split("  ", 1)
    assert step == "step 1/20"
    assert figures.startswith(EVERYTHING + "  eta ")
    assert lines[3:] == ["eval after step 1: math 0.500  code 1.000", "saved [here]"]


def test_plain_progress_prints_one_step_line_per_two_seconds() -> None:
    now = [0.0]
    target = console(False)

    def shown(total: int, steps: range) -> list[str]:
        progress = PlainProgress(total, start=steps.start, console=target, now=lambda: now[0])
        before = len(text_of(target).splitlines())
        for step in steps:
            progress.step(step, METRICS)
            now[0] += 0.5
        lines_of_steps = text_of(target).splitlines()[before:]
        progress.close()
        progress.close()
        held_back = len(text_of(target).splitlines()) - before - len(lines_of_steps)
        assert held_back == (steps.stop < total)  # a run that ends early prints its last step
        return [line.split()[2] for line in text_of(target).splitlines()[before:]]

    assert shown(10, range(10)) == ["1/10", "5/10", "9/10", "10/10"]
    assert shown(10, range(3, 6)) == ["4/10", "6/10"]
    progress = PlainProgress(100, start=0, console=target, now=lambda: now[0])
    for step in range(3):
        progress.step(step, METRICS)
    progress.evaluation(3, {"math": 0.5})
    progress.message("interrupted")
    last = [line.split("] ")[1].split("  ")[0] for line in text_of(target).splitlines()[-4:]]
    assert last == ["step 1/100", "step 3/100", "eval after step 3: math 0.500", "interrupted"]


def test_rich_progress_shows_step_components_and_metrics() -> None:
    progress = RichProgress(20, start=4, title="a run", console=console(True))
    progress.status("rollout", "generating 3/8 groups")
    progress.status("trainer", "idle")
    for step in range(4, 16):
        progress.step(step, METRICS)
    progress.evaluation(16, {"math": 0.75})
    plain = Console(file=io.StringIO(), width=100)
    plain.print(progress.render())
    progress.close()
    progress.close()
    shown = text_of(plain)
    for expected in ("a run", "step 16/20", "generating 3/8 groups", "trainer", "idle", "0.512", "12,346"):
        assert expected in shown
    assert "eval after step 16: math 0.750" in shown
    assert [line.split()[1] for line in shown.splitlines() if "12,346" in line] == [str(n) for n in range(9, 17)]


def test_rich_progress_accepts_missing_metrics_and_markup_characters() -> None:
    with RichProgress(0, start=0, title="t", console=console(True)) as progress:
        progress.status("rollout", "[/broken")
        progress.step(0, {"train/loss": None})
        progress.message("[/also broken")
        progress.render()


def test_rich_progress_omits_columns_without_metrics() -> None:
    progress = RichProgress(2, start=0, title="t", console=console(True))
    progress.step(0, {"train/loss": 1.5, "rollout/response_len/mean": 3.0, "perf/step_time": 0.5})
    plain = Console(file=io.StringIO(), width=100)
    plain.print(progress.render())
    progress.close()
    header = next(line for line in text_of(plain).splitlines() if "loss" in line)
    assert header.split()[1:-1] == ["step", "loss", "length", "s/step"]


def test_eta_excludes_start_up_time() -> None:
    now = [100.0]
    clock = StepClock(10, 4, now=lambda: now[0])
    assert clock.eta_s is None
    now[0] = 160.0  # 58 s of loading, then a step of 2 s
    clock.advance(4, 2.0)
    assert clock.eta_s == pytest.approx(2.0 * 5)
    now[0] = 164.0
    clock.advance(5, 4.0)
    assert clock.eta_s == pytest.approx(3.0 * 4)
    assert clock.elapsed_s == 64.0
    assert clock.position == 6


def test_step_line_fits_the_width_and_omits_zero_counts() -> None:
    assert step_line(0, 20, METRICS) == f"step 1/20  {EVERYTHING}"
    short = step_line(0, 20, METRICS, width=80, tail="  eta 0:10")
    assert short == "step 1/20  reward 0.512  loss -0.0123  length 17.2  s/step 2.50  eta 0:10"
    nothing_cut = METRICS | {"rollout/truncated_ratio": 0.0, "rollout/zero_std/count": 0.0}
    assert "cut" not in step_line(0, 20, nothing_cut)
    assert "0-std" not in step_line(0, 20, nothing_cut)


@pytest.mark.parametrize(("name", "shown"), [("train/kl_loss", "kl 0.5"), ("rollout/kl", "kl 0.5")])
def test_reference_kl_takes_precedence_over_old_policy_kl(name: str, shown: str) -> None:
    assert shown in step_line(0, 1, {name: 0.5, "train/ppo_kl": 0.25})
    assert "kl 0.25" in step_line(0, 1, {"train/ppo_kl": 0.25})


@pytest.mark.parametrize(
    ("width", "titles"),
    [
        (140, "step reward loss grad kl entropy length cut 0-std tok/s s/step"),
        (80, "step reward loss grad kl entropy length cut 0-std s/step"),
        (60, "step reward loss grad entropy length s/step"),
    ],
)
def test_rich_table_shows_the_columns_that_fit_the_terminal(width: int, titles: str) -> None:
    screen = Console(file=io.StringIO(), width=width)
    progress = RichProgress(2, start=0, title="t", console=console(True))
    progress.step(0, METRICS)
    screen.print(progress.render())
    progress.close()
    lines = text_of(screen).splitlines()
    assert max(map(len, lines)) == width
    assert next(line for line in lines if "reward" in line).strip("│ ").split() == titles.split()


def test_plain_progress_reports_status_after_a_quiet_period() -> None:
    now = [0.0]
    target = console(False)
    progress = PlainProgress(9, start=0, console=target, now=lambda: now[0])

    def said() -> list[str]:
        return [line.split("] ", 1)[1] for line in text_of(target).splitlines()]

    progress.status("trainer", "starting 1 process(es)")
    progress.status("weights", "version 0 on all engines", busy=False)
    progress.status("rollout", "generating 4 groups")
    progress.watch("engine", lambda: ("3 running", True))
    assert len(said()) == 3
    now[0] += QUIET_S - 1
    assert progress.report_if_quiet() == 1.0
    assert len(said()) == 3
    now[0] += 1
    progress.report_if_quiet()
    busy = "trainer: starting 1 process(es) (for 0:30); rollout: generating 4 groups (for 0:30); engine: 3 running"
    assert said()[3:] == [busy]
    progress.status("trainer", "waiting")
    progress.watch("rollout", lambda: ("evaluating 5/8 samples", True))
    now[0] += QUIET_S
    progress.report_if_quiet()
    assert said()[-1] == "rollout: evaluating 5/8 samples; engine: 3 running"
    progress.step(0, METRICS)
    assert progress.report_if_quiet() == QUIET_S
    progress.close()


def test_plain_progress_polls_watched_status_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime.observability.progress.QUIET_S", 0.01)
    said = threading.Event()

    def doing() -> tuple[str, bool]:
        said.set()
        return "loading", True

    with PlainProgress(1, start=0, console=console(False)) as progress:
        progress.watch("engine", doing)
        assert said.wait(240)


def test_rich_table_shows_watched_status() -> None:
    answers: list[tuple[str, bool] | None] = [("12/64 samples, 80 tok/s", True), None]
    progress = RichProgress(1, start=0, title="t", console=console(True))
    progress.status("rollout", "generating 8 groups")
    progress.watch("rollout", lambda: answers.pop(0) if len(answers) > 1 else answers[0])
    progress.close()
    answers[:] = [("12/64 samples, 80 tok/s", True), None]
    for expected in ("12/64 samples, 80 tok/s", "generating 8 groups"):
        screen = Console(file=io.StringIO(), width=80)
        screen.print(progress.render())
        assert expected in text_of(screen)


@pytest.mark.parametrize("kind", ["plain", "rich", "none"])
def test_steps_evaluations_messages_and_warnings_are_logged(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with make_progress(Config(hf_checkpoint="x", progress=kind), 3) as progress:
        progress.step(0, METRICS)
        progress.evaluation(1, {"math": 0.5})
        progress.message("note: something")
        progress.warn("look here")
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", f"step 1/3  {EVERYTHING}"),
        ("INFO", "eval after step 1: math 0.500"),
        ("INFO", "note: something"),
        ("WARNING", "look here"),
    ]


def test_missing_metrics_are_shown_as_dashes() -> None:
    assert set(figures_of({})) == {"-"}


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "-"), (0.4, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3661, "1:01:01")]
)
def test_format_seconds(seconds: float | None, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(("kind", "made"), [("auto", PlainProgress), ("plain", PlainProgress), ("none", Progress)])
def test_progress_flag_selects_the_display(kind: str, made: type) -> None:
    with make_progress(Config(hf_checkpoint="x", progress=kind), 3) as progress:
        assert type(progress) is made


def test_rich_progress_can_be_forced() -> None:
    with make_progress(Config(hf_checkpoint="x", progress="rich"), 3) as progress:
        assert isinstance(progress, RichProgress)


def test_summary_prints_every_row() -> None:
    target = console(False)
    print_summary([("held-out", "0.42 -> 0.95"), ("path", "outputs/[x]/metrics.jsonl")], console=target)
    shown = text_of(target)
    assert "Summary" in shown
    assert "0.42 -> 0.95" in shown
    assert "outputs/[x]/metrics.jsonl" in shown


def test_only_slow_start_up_work_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("slime.observability.progress.FIRST_S", 600.0)
    with notify_if_slow("reading the prompts", say=said.append):
        pass
    assert said == []
    monkeypatch.setattr("slime.observability.progress.FIRST_S", 0.01)
    heard = threading.Event()
    with notify_if_slow("reading the prompts", say=lambda text: (said.append(text), heard.set())[0]):
        assert heard.wait(240)
    assert re.fullmatch(r"\[\d+:\d\d\] reading the prompts", said[0])
    before = threading.active_count()
    with notify_if_slow("reading the prompts", silent=True):
        assert threading.active_count() <= before
