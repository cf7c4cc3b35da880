"""The training loop: get a rollout, train on it, publish the weights, evaluate.

    prompts ─► ROLLOUT ──samples──► BUFFER ──batches──► TRAINING
                  ▲                                        │
                  └────────────── weights ─────────────────┘

The modes differ only in the feed that rollouts come from (`slime.rollout.pipeline`): made on demand, one step ahead, or
taken from a generation that never stops.

Invariants: training on rollout r makes weight version r + 1 (version 0 are the weights that the run starts with).
Without asynchrony rollout r is sampled with version r exactly, or with the last published one
(`--update-weights-interval`). Every sample is in the journal from the moment its prompt is handed out; rollouts that
the last checkpoint does not cover are trained on again as they were, so a resumed run continues as if it had never
stopped. However a run ends, none of its processes is left behind.

The debug modes run one half of the loop: without trainers nothing is trained, published or saved; without engines
nothing is evaluated.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any

from slime.cluster.factory import find_machines
from slime.cluster.garbage_collection import gc_frozen
from slime.cluster.process import process_tree
from slime.cluster.watchdog import watch_signals
from slime.config import Config, resolve_for_run, save_config
from slime.config.async_mode import is_async
from slime.config.datasets import eval_datasets, evaluates, prompt_files
from slime.config.flags.rollout import DEFAULT_ROLLOUT_FUNCTION
from slime.config.initial_weights import describe_initial_weights, model_folders
from slime.config.plugins import check_given, load_function
from slime.config.plugins.tracking import forward_metrics_to
from slime.config.plugins.view import as_config
from slime.data.buffer import Journal, JournaledSource, open_journal
from slime.data.source_state import saved_rollouts
from slime.driver.colocate import GpuTimeSharing
from slime.driver.components import RunComponents
from slime.driver.inputs import (
    TrainingResult,
    count_rollouts,
    find_finished_result,
    log_run_failures,
    open_data_source,
    read_eval_prompts,
    signals_as_interrupts,
)
from slime.driver.plan.plan import make_plan, needs_engines
from slime.driver.recovery import RESTARTABLE_ERRORS, RestartPolicy, rescue_weights
from slime.engine.fleet.processes import fixed_ports
from slime.models.folder import check_model
from slime.observability.logs import configure_logging, repeated_warnings
from slime.observability.memory import MemorySampler, PhaseMemory, memory_sources
from slime.observability.metrics import MetricsLog, idle_seconds, read_metrics, straggler_seconds
from slime.observability.plots import RunPlots
from slime.observability.progress import Progress, make_progress, notify_if_slow
from slime.observability.run_dir import RunDir
from slime.observability.summary import show_summary
from slime.rollout.debug_data import (
    PER_DATASET,
    PER_ROLLOUT,
    DumpedRollouts,
    completion_rows,
    evaluated_samples,
    save_evaluation,
)
from slime.rollout.evaluate import EvalPrompts, complete_evaluation, evaluate
from slime.rollout.health_warnings import HealthWarnings
from slime.rollout.outcomes import RolloutFnEvalOutput, RolloutFnTrainOutput, call_rollout_fn, leaves
from slime.rollout.pipeline import GeneratedRollout, RolloutFeed, RolloutMaker, make_feed
from slime.storage.json_types import JsonObject
from slime.train.ci_checks import check_grad_norms, check_numbers

logger = logging.getLogger(__name__)


def train(args: Config | argparse.Namespace, *, reward: Callable[..., object] | None = None) -> TrainingResult:
    """Run a whole training; `reward` replaces --rm-type and --custom-rm-path (for notebooks).

    `args` is a config, or the namespace of `slime.utils.arguments.parse_args`, changed or not.

    Flags, model config and prompts are read before the run folder is touched: a mistake in them writes no file.
    """
    if reward is not None:
        check_given(reward, "--custom-rm-path", "the given reward function")
    config = resolve_for_run(as_config(args))
    machines = find_machines(config)
    device = machines.device
    plan = make_plan(
        config, device=device, gpu_count=machines.gpus, nodes=machines.nodes, reward_given=reward is not None
    )
    for folder in model_folders(config).values():
        check_model(folder, trust_remote_code=config.trust_remote_code)
    if needs_engines(config):
        fixed_ports(config)
    with notify_if_slow("reading the prompts", silent=config.progress == "none"):
        data_source = open_data_source(config)
    finished = find_finished_result(config, count_rollouts(config, data_source))
    if finished is not None:
        return finished
    with notify_if_slow("reading the evaluation prompts", silent=config.progress == "none"):
        datasets = read_eval_prompts(config)
    lives = RestartPolicy(config)
    with signals_as_interrupts(), watch_signals(), ExitStack() as stack:
        with notify_if_slow(
            f"checking whether the run that used {config.output_dir} on another machine is still alive",
            silent=config.progress == "none",
        ):
            run_dir = stack.enter_context(RunDir(config.output_dir))
        memory = stack.enter_context(MemorySampler(lambda: process_tree(os.getpid())))
        while True:
            try:
                run = _live(lives, device, run_dir, data_source, datasets, reward, plan.notes, memory)
                lives.complete(run)
                return run.result
            except RESTARTABLE_ERRORS as error:
                if not lives.prepare_restart(error):
                    raise
            data_source = open_data_source(lives.config)


def _live(
    lives: RestartPolicy,
    device: str,
    run_dir: RunDir,
    data_source: Any,
    datasets: dict[str, EvalPrompts],
    reward: Callable[..., object] | None,
    notes: Sequence[str],
    memory: MemorySampler,
) -> Run:
    """Run one attempt, from the start of its processes to its end; no process of it is left when this returns."""
    config = lives.config
    with ExitStack() as stack:
        journal: Journal | None = None  # one needs engines that sample and trainers that consume
        if not config.debug_rollout_only and config.load_debug_rollout_data is None:
            journal = open_journal(config, run_dir.journal, prompt_files(config))
            stack.callback(journal.close)
        again = lives.restarts > 0
        run = Run(config, device, run_dir, stack, data_source, journal, reward, notes=notes, again=again)
        lives.began(run)
        with log_run_failures(run.config, run.progress), rescue_weights(run):
            run.runtime.eval_datasets.update(datasets)
            run.loop()
        run.result.peak_memory_gib = memory.stop() / 2**30
        with rescue_weights(run):
            run.finish()
    return run


class Run:
    """One attempt of a run: `again` after the first one. Its components are started in the constructor and stopped by
    `stack`, in reverse order."""

    def __init__(
        self,
        config: Config,
        device: str,
        run_dir: RunDir,
        stack: ExitStack,
        data_source: Any,
        journal: Journal | None,
        reward: Callable[..., object] | None,
        *,
        notes: Sequence[str] = (),
        again: bool = False,
    ) -> None:
        self.device = device
        self.run_dir = run_dir
        self.result = TrainingResult(run_dir.path)
        self._began = time.monotonic()
        self.journal = journal
        self.trained: int | None = None
        self.saved: int | None = None
        self.data_source = data_source if journal is None else JournaledSource(data_source, journal)
        self.total = count_rollouts(config, data_source)
        self.config = config = config.replace(num_rollout=self.total)
        self.curves = RunPlots(run_dir.metrics)
        stack.callback(self.curves.finish)  # also after Ctrl-C or a failure, after everything else has stopped
        self.progress: Progress = stack.enter_context(make_progress(config, self.total))
        configure_logging(run_dir, "driver", config.log_level, console=self.progress.console)
        stack.callback(self._say_repeats)
        for note in () if again else notes:
            self.progress.message(f"note: {note}")
        self.parts = RunComponents(config, device, run_dir, stack, reward=reward, progress=self.progress)
        self.config = config = self.parts.config
        self.runtime, self.trainers, self.start = self.parts.runtime, self.parts.trainers, self.parts.start
        phase_memory: PhaseMemory | None = None
        if device == "cuda" or config.offload_rollout or config.offload_train:
            phase_memory = stack.enter_context(PhaseMemory(run_dir.memory, memory_sources(device)))
        self.turns = GpuTimeSharing(self.parts, phase_memory)
        self._watch(stack)
        if not again:
            save_config(config, run_dir.config)
        self.runtime.journal = journal
        if self.start and config.load is not None:
            self.progress.message(f"resuming from {config.load} at step {self.start + 1}")
        elif self.trainers is not None:
            self.progress.message(f"trainer: the actor starts from {describe_initial_weights(config)}")
        self._replayed: list[int] = []
        """Rollouts after the checkpoint, which the journal has already."""
        if journal is None:
            self.data_source.load(self.start - 1)
        else:
            self._replayed = self.data_source.resume(self.start)
        if self._replayed:
            self.progress.message(
                f"the journal has {len(self._replayed)} rollout(s) from before the resume: reusing them"
            )
        self.metrics = MetricsLog(run_dir, config, start_rollout_id=self.start, again=again)
        stack.callback(self.metrics.close)
        stack.enter_context(forward_metrics_to(self.log_for_plugin))
        self._concerns = HealthWarnings(config, lambda: self.runtime.tokenizer.all_special_tokens)
        self._largest: tuple[float | None, float | None] = None, None  # gradient norm, advantage of the last rollout
        self._eval_fn = _rollout_function(config.eval_function_path, "--eval-function-path")
        self._log_eval = _log_function(
            config.custom_eval_rollout_log_function_path,
            "--custom-eval-rollout-log-function-path",
            ("rollout_id", "args", "data", "extra_metrics"),
        )

    @property
    def wandb_run_id(self) -> str | None:
        return self.metrics.wandb_run_id

    def _say_repeats(self) -> None:
        for line in repeated_warnings():
            self.progress.warn(line)

    def _watch(self, stack: ExitStack) -> None:
        """Register the sources of the display's rows for the rollout and the engines."""
        states = self.parts.watch_engines(stack) if self.config.progress != "none" else None

        def rollout() -> tuple[str, bool] | None:
            speed = None if states is None else states.tokens_per_s
            evaluated, made = self.runtime.eval_pulse.sentence(speed), self.runtime.pulse.sentence(speed)
            if evaluated is not None:
                return f"evaluating, {evaluated}", True
            return None if made is None else (f"generating, {made}", True)

        self.progress.watch("rollout", rollout)
        if states is not None:
            self.progress.watch("engine", states.sentence)

    def _make_feed(self) -> RolloutFeed:
        config = self.config
        log = _log_function(
            config.custom_rollout_log_function_path,
            "--custom-rollout-log-function-path",
            ("rollout_id", "args", "samples", "rollout_extra_metrics", "rollout_time"),
        )
        rollout_fn = _rollout_function(config.rollout_function_path, "--rollout-function-path")
        if isinstance(self.data_source, DumpedRollouts):
            rollout_fn = self.data_source.generate_rollout
        maker = RolloutMaker(self.runtime, rollout_fn, self.data_source, log=log, at_work=self.parts.engines_at_work)
        return make_feed(maker, start=self.start, total=self.total, replayed=self._replayed)

    # the loop

    def loop(self) -> None:
        config, total = self.config, self.total
        self.publish_weights(self.start)
        evaluates_first = total == 0 or (self.start == 0 and not config.skip_eval_before_train)
        if not evaluates_first and self.start and _is_due(self.start - 1, config.eval_interval, total):
            # the run may have been killed between the checkpoint that it resumes from and the evaluation after it
            records = read_metrics(self.run_dir.metrics)
            evaluates_first = not any(one["kind"] == "eval" and one["step"] == self.start for one in records)
        if evaluates_first:
            self.evaluate(self.start)
        with gc_frozen(), closing(self._make_feed()) as feed:
            for rollout_id in range(self.start, total):
                began = time.monotonic()
                self.turns.to_rollout()
                self.progress.status("rollout", f"generating {config.rollout_batch_size} groups")
                rollout = feed.get(rollout_id)
                self.progress.status("rollout", "generating ahead" if is_async(config) else "waiting")
                waited = time.monotonic() - began
                after = self.train_on(rollout_id, rollout)
                evaluates_now = evaluates(config) and _is_due(rollout_id, config.eval_interval, total)
                with ExitStack() as held:
                    if evaluates_now or _is_due(rollout_id, config.update_weights_interval, total):
                        held.enter_context(feed.undisturbed())
                        after |= self.publish_weights(rollout_id + 1)
                        feed.weights_arrived(rollout_id + 1)
                    if not evaluates_now:  # else the feed stays held: the evaluation need not wait for a whole rollout
                        held.close()
                    after |= self.turns.metrics()
                    step_s = time.monotonic() - began
                    after |= {"perf/rollout_wait_time": waited, "perf/step_time": step_s}
                    after |= straggler_seconds(rollout.metrics, waited)
                    after["perf/idle_time"] = idle_seconds(rollout.metrics | after)
                    self._finish_step(rollout_id, rollout, after)
                    if evaluates_now:
                        self.evaluate(rollout_id + 1)
        self._finish_save(patient=True)

    def _finish_step(self, rollout_id: int, rollout: GeneratedRollout, after: JsonObject) -> None:
        """Log and show the step, then save; as the log comes first, all steps of a checkpoint are on record."""
        logged = after if rollout.is_logged else rollout.metrics | after
        own = {name: value for name, value in logged.items() if not name.startswith("train/")}
        self.metrics.log(own, rollout_id, "rollout", rollout_id=rollout_id)
        if not rollout.is_logged:
            rows = completion_rows(self.config, leaves(rollout.samples), PER_ROLLOUT)
            self.metrics.log_completions("rollout", rows, rollout_id, "rollout", rollout_id=rollout_id)
        self.result.metrics.append(rollout.metrics | after)
        self._finish_save(patient=False)
        if _is_due(rollout_id, self.config.save_interval, self.total):
            self.save(rollout_id)
        self.progress.step(rollout_id, rollout.metrics | after)
        self.curves.redraw()
        for concern in self._concerns.about(rollout_id, list(leaves(rollout.samples)), *self._largest):
            self.progress.warn(concern)

    def log_for_plugin(self, metrics: JsonObject, step_key: str) -> None:
        """Write a record of what a plugin logs; its step is `metrics[step_key]`, else the present rollout."""
        now = self.start if self.trained is None else self.trained + 1
        step = metrics.get(step_key)
        step = int(step) if isinstance(step, int | float) and math.isfinite(step) else now
        others = {name: value for name, value in metrics.items() if name != step_key}
        rollout_id = min(max(step, now), now + 1) if step_key == "rollout/step" else now  # one may be generated ahead
        self.metrics.log(others, step, "plugin", rollout_id=rollout_id)

    def train_on(self, rollout_id: int, rollout: GeneratedRollout) -> JsonObject:
        """Train on a rollout and return its metrics; a rollout that filled no optimizer step has none of a step."""
        if self.trainers is None:
            return {}
        self.turns.to_training()
        self.progress.status("trainer", f"training on rollout {rollout_id}")
        with self.parts.trainers_at_work():
            trained = self.trainers.train(rollout_id, rollout.samples, last=rollout_id == self.total - 1)
            self.parts.trained(rollout_id + 1)
        steps = trained.metrics
        self._largest = _largest(steps, "train/grad_norm"), _largest(steps, "train/advantages_abs_max")
        for warning in trained.warnings:
            self.progress.warn(warning)
        for metrics, step_key in trained.logged:
            self.log_for_plugin(metrics, step_key)
        self.trained = rollout_id
        for metrics in trained.metrics:
            self.metrics.log(metrics, int(metrics["train/step"]), "train", rollout_id=rollout_id)
        if self.config.ci_test and trained.metrics:
            check_numbers(self.config, rollout_id, trained.metrics)
        check_grad_norms(self.config, rollout_id, trained.metrics)
        self.progress.status("trainer", "waiting")
        if self.journal is not None:
            self.journal.consumed(rollout_id)
            if self.config.save is None:  # there are no checkpoints to resume from
                self.journal.checkpointed(rollout_id)
        return trained.rollout_metrics | (trained.metrics[-1] if trained.metrics else {})

    def publish_weights(self, version: int) -> dict[str, float]:
        if self.parts.publisher is None:
            return {}
        self.turns.to_publishing()
        self.progress.status("weights", f"publishing version {version}")
        published = self.parts.publish(version)
        self.progress.status("weights", published.in_words(), busy=False)
        return published.metrics()

    def evaluate(self, step: int) -> None:
        """Evaluate the weights after `step` rollouts."""
        if not evaluates(self.config) or self.parts.engines is None:
            return
        self.turns.to_rollout()
        self.progress.status("rollout", "evaluating")
        self.runtime.state.evaluation_id = step
        evaluated: RolloutFnTrainOutput | RolloutFnEvalOutput
        with self.parts.engines_at_work():
            if self._eval_fn is None:
                evaluated = self.runtime.run(evaluate(self.runtime, step), whom=f"evaluation {step}")
            else:
                args, source = self.runtime.plugin_args, self.data_source
                evaluated = call_rollout_fn(self._eval_fn, args, step, source, evaluation=True)
        assert isinstance(evaluated, RolloutFnEvalOutput)
        output = complete_evaluation(self.runtime.args, evaluated)
        metrics = dict(output.metrics or {})
        save_evaluation(self.config, step, output.data)
        completions = evaluated_samples(output.data)
        if self.journal is not None:
            self.journal.keep_evaluation(step, completions)
        if self._log_eval(step, self.runtime.plugin_args, output.data, dict(metrics)) is not True:
            rollout_id = max(step - 1, 0)
            self.metrics.log(metrics, step, "eval", rollout_id=rollout_id)
            for name, samples in completions.items():
                rows = completion_rows(self.config, samples, PER_DATASET, evaluation=True)
                self.metrics.log_completions(f"eval/{name}", rows, step, "eval", rollout_id=rollout_id)
        self.result.evaluations.append((step, metrics))
        names = [name for name in output.data if f"eval/{name}" in metrics]
        self.progress.evaluation(step, {name: metrics[f"eval/{name}"] for name in names})
        self.progress.status("rollout", "waiting")

    def save(self, rollout_id: int) -> None:
        """Save the data position, the journal and the trainers' checkpoint, in this order.

        Invariant: a run resumes only from a complete checkpoint. The journal is made durable before the checkpoint, so
        that the samples of a checkpoint survive a power cut too. With `--async-save` the run continues while the
        checkpoint is written, and the previous one is valid until it is complete.
        """
        if self.trainers is None:
            return
        in_background = self.config.async_save and self.config.save is not None
        if self.config.save is not None:
            self._finish_save(patient=True)
            self.progress.status("trainer", "saving a checkpoint")
            self.data_source.save(rollout_id)
            if self.journal is not None:
                self.journal.sync()
            with self.parts.trainers_at_work():
                self.trainers.save(rollout_id)
            if not in_background:
                self._checkpointed(rollout_id)
        if self.config.save_hf is not None:
            self.progress.status("trainer", "saving a Hugging Face folder")
            with self.parts.trainers_at_work():
                self.trainers.save_hf(self.config.save_hf.format(rollout_id=rollout_id))
        self.progress.status("trainer", "waiting")
        if not in_background:
            self.saved = rollout_id

    def _finish_save(self, *, patient: bool) -> None:
        """Register a checkpoint that was written in the background, if it is complete; wait for it if `patient`."""
        if self.trainers is None:
            return
        if patient and self.trainers.is_saving:
            self.progress.status("trainer", "finishing a checkpoint")
        with self.parts.trainers_at_work():
            saved = self.trainers.finish_save(patient=patient)
        if saved is not None:
            self._checkpointed(saved)
            self.saved = saved

    def _checkpointed(self, rollout_id: int) -> None:
        if self.journal is not None:
            assert self.config.save is not None
            self.journal.checkpointed(rollout_id, kept=saved_rollouts(self.config.save))

    def finish(self) -> None:
        self.result.seconds = time.monotonic() - self._began
        self.progress.close()
        datasets = [(one.name, one.path) for one in eval_datasets(self.config)]
        show_summary(
            self.result,
            self.config.replace(eval_prompt_data=datasets),
            self.curves.finish(),
            self.progress.console,
            earlier=self.metrics.kept,
        )


def _rollout_function(path: str | None, flag: str) -> Callable[..., Any] | None:
    """Load the user's rollout function; None for the default one, which the run calls with the runtime it holds."""
    if path == DEFAULT_ROLLOUT_FUNCTION:
        return None
    assert path is not None
    return load_function(path, what=flag, params=("args", "rollout_id", "data_source"))


def _log_function(path: str | None, flag: str, params: tuple[str, ...]) -> Callable[..., object]:
    """Load the user's log function; without one return a function that leaves the logging to the run."""
    return load_function(path, what=flag, params=params) if path is not None else lambda *_: False


def _is_due(rollout_id: int, interval: int | None, total: int) -> bool:
    """Return True at every multiple of the interval and after the last rollout."""
    return rollout_id == total - 1 or (interval is not None and (rollout_id + 1) % interval == 0)


def _largest(steps: Iterable[Mapping[str, float]], name: str) -> float | None:
    """Return the largest value of a metric; None if no step has it, as steps of the critic alone."""
    return max((step[name] for step in steps if name in step), default=None)
