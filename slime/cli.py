"""The `slime` command. Help, errors in flags and plans are fast: torch is imported only when something really runs."""

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
  eval         evaluate a model, or with --load a checkpoint, on --eval-prompt-data or --eval-config, and end; it needs
               no prompts to train on, and takes the other flags of train
  stages       train in stages that one config file describes: slime stages FILE [FLAGS] (docs/stages.md)
  plan         print what a training run would do, and stop; the same as slime train --dry-run
  samples      list, filter and export the samples of a run (slime samples --help)
  serve        start the embedded inference engine alone (slime serve --help), or with --rollout-backend or
               --rollout-num-gpus several engines and a router (the engine flags of train);
               slime serve --join HOST:PORT starts an engine for a run that was started with --fleet-address
  fleet        list the engines of such a run: slime fleet RUN_DIR (slime fleet --help)
  convert      write a checkpoint of a run, or a model folder in another precision, as a Hugging Face folder
               (slime convert --help)
  models       list published models whose shape is known; slime models NAME prints a config.json to plan with, and
               makes a folder with random weights to try a run with (slime models --help)
  flags        list all flags of train, or those that match all given words: slime flags batch size; --markdown prints
               the table of the documentation, --stub the signature of slime.run
  version      print the version
"""

_COMMANDS = (
    "train", "train-async", "eval", "stages", "plan", "serve", "fleet", "samples", "convert", "models", "flags",
    "version",
)  # fmt: skip
EXIT_OK, EXIT_RUN_FAILED, EXIT_USER_ERROR, EXIT_INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; a user's mistake is one line on stderr and exit code 2."""
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
    """Return the function of the command that the words begin with."""
    from slime.config import parse_flags, resolve
    from slime.config.fields import did_you_mean

    if not words:
        raise UserError(f"a command is missing: one of {', '.join(_COMMANDS)}")
    match words[0]:
        case "train":
            return lambda rest: _run(resolve(parse_flags(rest)))
        case "train-async":
            return _train_async
        case "eval":
            return _eval
        case "stages":
            return _stages
        case "plan":
            return lambda rest: _run(resolve(parse_flags([*rest, "--dry-run"])))
        case "serve":
            return _serve
        case "fleet":
            from slime.engine.elastic.fleet_cli import fleet_command

            return fleet_command
        case "samples":
            from slime.data.buffer.samples_cli import samples_command

            return samples_command
        case "convert":
            from slime.driver.convert import convert_command

            return convert_command
        case "models":
            from slime.models.models_cli import models_command

            return models_command
        case "flags":
            return _flags
        case "version" | "--version":
            return _version
    hint = did_you_mean(words[0], (*_COMMANDS, "--version")) or ": slime --help lists the commands"
    raise UserError(f"unknown command {words[0]}{hint}")


def _train_async(words: Sequence[str]) -> int:
    from slime.config import resolve
    from slime.config.async_mode import default_async_mode
    from slime.config.parser import parse_flags

    config = parse_flags(words)
    if config.async_mode is None:
        config = config.replace(async_mode=default_async_mode(config))
    return _run(resolve(config))


def _eval(words: Sequence[str]) -> int:
    from slime.config import resolve
    from slime.config.datasets import evaluates
    from slime.config.parser import parse_flags

    config = parse_flags(words)
    if config.num_rollout:
        raise UserError(f"slime eval trains nothing: drop --num-rollout {config.num_rollout}, or use slime train")
    if not evaluates(config):
        raise UserError("slime eval needs data: --eval-prompt-data NAME PATH, or --eval-config FILE")
    return _run(resolve(config.replace(num_rollout=0)))


def _run(config: Config) -> int:
    """Train, or with --dry-run print the plan."""
    if config.dry_run:
        from slime.driver.plan.plan import make_plan
        from slime.driver.plan.schedule import planned_machines

        found = planned_machines(config)
        print(make_plan(config, device=found.device, gpu_count=found.gpus, nodes=found.nodes).render(), end="")
        return EXIT_OK
    if config.progress != "none":  # the imports of a run take seconds
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
        from slime.engine.sglang.launch import ROUTER_OPTIONS_OF_RUN, SERVER_OPTIONS_OF_RUN

        decided = {f"sglang-{name}": flag for name, flag in SERVER_OPTIONS_OF_RUN.items()}
        decided |= {f"router-{name}": flag for name, flag in ROUTER_OPTIONS_OF_RUN.items()}
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
