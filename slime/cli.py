"""The `slime` command. Help, errors in flags and plans are fast: torch is imported only when something really runs."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from slime.errors import RunFailed, UserError

if TYPE_CHECKING:
    from slime.config import Config

_USAGE = """\
usage: slime COMMAND ...

  quickstart   train a tiny model to add, the whole system on a CPU, two minutes
  train        train a model; the same as python train.py
  train-async  train while the next responses are generated
  eval         evaluate a model or checkpoint
  stages       train in stages that one file describes
  plan         print what a training command would do, and whether it fits
  samples      list, filter and export the samples of a run
  serve        start inference engines
  fleet        list the engines of a run
  convert      write a checkpoint as a Hugging Face folder
  models       list known models; print a config.json to plan with
  flags        search the flags by words
  help         help on a command, a topic or a flag
  version      print the version

Flags of train that most runs need
"""
_MORE = """
slime COMMAND --help shows a command, slime --help-all every flag, slime help TOPIC the flags of a topic:
"""

_STAGES_USAGE = """\
usage: slime stages FILE [--FLAG VALUE ...]

Trains in stages that a TOML or YAML file describes. Flags of slime train that follow apply to every stage.
"""
_COMMANDS = (
    "quickstart", "train", "train-async", "eval", "stages", "plan", "samples", "serve", "fleet", "convert", "models",
    "flags", "help", "version",
)  # fmt: skip
EXIT_OK, EXIT_RUN_FAILED, EXIT_USER_ERROR, EXIT_INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; a user's mistake is one line on stderr and exit code 2."""
    words = list(sys.argv[1:] if argv is None else argv)
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
        case "quickstart":
            from slime.quickstart import quickstart_command

            return quickstart_command
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
        case "help" | "--help" | "-h":
            return _help
        case "--help-all":
            return lambda rest: _run(parse_flags(["--help-all"]))
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

    if words and words[0] in ("-h", "--help"):
        print(_STAGES_USAGE, end="")
        return EXIT_OK
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


def _help(words: Sequence[str]) -> int:
    """Print the first screen, or the help on a command, a topic or a flag."""
    from slime.config.help import format_essentials, format_topic, topics

    if not words:
        print(_USAGE + format_essentials() + _MORE, end="")
        names = textwrap.fill(", ".join(topics()), 96, break_on_hyphens=False)
        print(textwrap.indent(names, "  "))
        return EXIT_OK
    topic = words[0]
    found = format_topic(topic) if len(words) == 1 else None
    if found is not None:
        print(found, end="")
        return EXIT_OK
    if topic in _COMMANDS and topic not in ("help", "version", "flags"):
        return _command([topic])(["--help"])
    return _flags(words)


def _version(words: Sequence[str]) -> int:
    from importlib.metadata import PackageNotFoundError, version

    try:
        print(f"slime {version('slime')}")
    except PackageNotFoundError:
        print("slime (not installed as a package)")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
