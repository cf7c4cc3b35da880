"""The `slime` command. Help, bad flags and plans answer at once: torch is imported only when something really runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from slime.errors import RunFailed, UserError

if TYPE_CHECKING:
    from slime.config import Config

_USAGE = """\
usage: slime COMMAND ...

  train        train a model; the same as python train.py (slime train --help lists the flags)
  train-async  the same, generating while it trains (--async-mode one-step or full); python train_async.py
  eval         evaluate a model, or with --load a checkpoint, on --eval-prompt-data or --eval-config, and end; no
               prompts to train on are needed, other flags are those of train
  stages       train in stages that one config file describes: slime stages FILE [FLAGS] (docs/stages.md)
  plan         say what a training run would do, and stop; the same as slime train --dry-run
  samples      list, filter and export the samples of a run (slime samples --help)
  serve        start the embedded inference engine alone (slime serve --help), or with --rollout-backend or
               --rollout-num-gpus several engines and a router (the engine flags of train);
               slime serve --join HOST:PORT works for a run that was started with --fleet-address
  fleet        list the engines of such a run: slime fleet RUN_DIR (slime fleet --help)
  convert      write a checkpoint of a run, or a model folder in other numbers, as a Hugging Face folder
               (slime convert --help)
  models       list published models whose shape is known; slime models NAME prints a config.json to plan with, and
               makes a folder with random weights to try a run with (slime models --help)
  flags        list all flags of train, or those with all given words: slime flags batch size; --markdown makes the
               table of the documentation, --stub the signature of slime.run
  version      print the version
"""

EXIT_OK, EXIT_RUN_FAILED, EXIT_USER_ERROR, EXIT_INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; a user's mistake is one line on stderr and exit code 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in ("-h", "--help", "help"):
        print(_USAGE, end="")
        return EXIT_OK
    try:
        return _command(words)(words[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except RunFailed as failure:
        print(f"error: {failure}", file=sys.stderr)
        return EXIT_RUN_FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except SystemExit as leave:  # the help of train and serve
        return leave.code if isinstance(leave.code, int) else EXIT_OK if leave.code is None else 1


def _command(words: Sequence[str]) -> Callable[[Sequence[str]], int]:
    from slime.config.fields import did_you_mean

    commands: dict[str, Callable[[Sequence[str]], int]] = {
        "train": _train,
        "train-async": _train_async,
        "eval": _eval,
        "stages": _stages,
        "plan": _plan,
        "serve": _serve,
        "fleet": _fleet,
        "samples": _samples,
        "convert": _convert,
        "models": _models,
        "flags": _flags,
        "version": _version,
        "--version": _version,
    }
    if not words:
        raise UserError(f"a command is missing: one of {', '.join(commands)[: -len(', --version')]}")
    if words[0] not in commands:
        hint = did_you_mean(words[0], commands) or ": slime --help lists the commands"
        raise UserError(f"unknown command {words[0]}{hint}")
    return commands[words[0]]


def _train(words: Sequence[str]) -> int:
    from slime.config import parse_args

    return _run(parse_args(words))


def _train_async(words: Sequence[str]) -> int:
    from slime.config import resolve
    from slime.config.async_mode import mode_of_train_async
    from slime.config.parser import parse_flags

    config = parse_flags(words)
    if config.async_mode is None:
        config = config.replace(async_mode=mode_of_train_async(config))
    return _run(resolve(config))


def _eval(words: Sequence[str]) -> int:
    from slime.config import resolve
    from slime.config.datasets import evaluates
    from slime.config.parser import parse_flags

    config = parse_flags(words)
    if config.num_rollout:
        raise UserError(f"slime eval trains nothing: drop --num-rollout {config.num_rollout}, or give slime train")
    if not evaluates(config):
        raise UserError("slime eval needs data: --eval-prompt-data NAME PATH, or --eval-config FILE")
    return _run(resolve(config.replace(num_rollout=0)))


def _run(config: Config) -> int:
    if config.dry_run:
        from slime.driver.plan.plan import make_plan
        from slime.driver.plan.schedule import planned_machines

        found = planned_machines(config)
        print(make_plan(config, device=found.device, gpu_count=found.gpus, nodes=found.nodes).render(), end="")
        return EXIT_OK
    if config.progress != "none":  # importing what a run needs takes seconds
        print(f"checking the model and the prompts; the run's files go to {config.output_dir}", flush=True)
    from slime.driver.loop import train

    train(config)
    return EXIT_OK


def _stages(words: Sequence[str]) -> int:
    from slime.driver.stages import read_stages

    if not words or words[0].startswith("-"):
        raise UserError("slime stages needs the config file first: slime stages FILE [FLAGS of slime train]")
    for stage in read_stages(words[0], words[1:]):
        print(stage.heading, flush=True)
        _run(stage.config())
    return EXIT_OK


def _plan(words: Sequence[str]) -> int:
    return _train([*words, "--dry-run"])


def _serve(words: Sequence[str]) -> int:
    from slime.engine.elastic.join_client import join_command, wants_to_join

    if wants_to_join(words):
        return join_command(words)
    from slime.engine.fleet.serve import serve_fleet, wants_fleet

    if wants_fleet(words):
        return serve_fleet(words)
    from slime.engine.embedded.__main__ import end_process
    from slime.engine.embedded.__main__ import main as serve

    end_process(serve(list(words)))


def _fleet(words: Sequence[str]) -> int:
    from slime.engine.elastic.fleet_cli import fleet_command

    return fleet_command(words)


def _samples(words: Sequence[str]) -> int:
    from slime.data.buffer.samples_cli import samples_command

    return samples_command(words)


def _convert(words: Sequence[str]) -> int:
    from slime.driver.convert import convert_command

    return convert_command(words)


def _models(words: Sequence[str]) -> int:
    from slime.models.models_cli import models_command

    return models_command(words)


def _flags(words: Sequence[str]) -> int:
    if list(words) == ["--markdown"]:
        from slime.config.help import format_markdown

        print(format_markdown(), end="")
        return EXIT_OK
    if list(words) == ["--stub"]:
        from slime.driver.keywords import format_stub

        print(format_stub(), end="")
        return EXIT_OK
    if words:
        from slime.config.help import search_flags
        from slime.engine.sglang.launch import OF_THE_ROUTER, OF_THE_RUN

        decided = {f"sglang-{name}": flag for name, flag in OF_THE_RUN.items()}
        decided |= {f"router-{name}": flag for name, flag in OF_THE_ROUTER.items()}
        print(search_flags(words, decided), end="")
        return EXIT_OK
    from slime.config.help import format_help

    print(format_help(), end="")
    return EXIT_OK


def _version(words: Sequence[str]) -> int:
    from importlib.metadata import PackageNotFoundError, version

    try:
        print(f"slime {version('slime')}")
    except PackageNotFoundError:
        print("slime (not installed as a package)")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
