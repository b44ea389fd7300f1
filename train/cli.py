"""The console script `evenload`. Each command imports what it needs when it runs, so that --help is instant."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from .._version import __version__
from .check import CHECK_HELP, check, check_arguments
from .compare_command import COMPARE_HELP, compare, compare_arguments
from .describe_command import DESCRIBE_HELP, describe, describe_arguments
from .eval_command import EVAL_HELP, eval_arguments, evaluate

COMMAND = "EVENLOAD_COMMAND"  # environment variable: what the user typed, for the ranks that `--nproc` starts
GRACE = 3.0  # seconds

TRAIN_HELP = """\
examples:
  evenload train tiny                                    the packaged configuration, on the interpreter's own text
  evenload train tiny run.steps=50 model.balancers=qb    with two values changed
  evenload train my.yaml --print-config                  what would run, as YAML
  evenload train my.yaml parallel.ep=4 --nproc 8         eight ranks on this machine, experts split over four of them
  evenload train tiny 'data.sources=[{name: novels, kind: text, path: "novels/*.txt", sample_by: paragraph}]'

A run that was stopped continues when the same command is given again.
"""

IMPORT_HELP = """\
Reads GLM-4-MoE, Qwen3-MoE and Kolibri-1 models that have our attention, and writes model.safetensors, config.json and
tokenizer.json as `evenload export RUN safetensors` does.

examples:
  evenload import glm-4-moe out=models/glm
  evenload import glm-4-moe out=models/glm 'balancers=[{name: eqb, space: scores}, {name: lei}]'
"""

EXPORT_HELP = """\
formats:
  safetensors    model.safetensors, config.json, tokenizer.json
  hf             a folder for AutoModelForCausalLM.from_pretrained of stock transformers, no remote code; with its tokenizer

examples:
  evenload export runs/tiny safetensors                  the newest checkpoint, into runs/tiny/export
  evenload export runs/tiny hf
  evenload export runs/tiny/checkpoints/step-00000100 safetensors out=model
"""


class Command(NamedTuple):
    """A subcommand: what it says about itself, its arguments, and the function that runs it."""

    help: str
    epilog: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def _train_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="a YAML file, or the name of a packaged configuration")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="values that replace the file's")
    parser.add_argument("--print-config", action="store_true", help="print the resolved configuration and stop")
    parser.add_argument(
        "--nproc", type=int, metavar="N", help="run as N ranks on this machine (under torchrun or srun: leave out)"
    )
    parser.add_argument(
        "--max-restarts", type=int, default=0, metavar="R", help="with --nproc: start again R times after a rank has failed"
    )


def _train(arguments: argparse.Namespace) -> int:
    # Read once, when torch starts its threads: how long an idle one spins before it sleeps. GNU OpenMP's default makes a step
    # ten times slower as soon as anything else wants a core, and no spinning at all halves the speed of an idle machine.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    from .checkpoint import CheckpointError
    from .config_file import load_config
    from .errors import ConfigError, TrainingStopped
    from .launch import launch, launched

    try:
        config = load_config(arguments.config, arguments.overrides)
        if arguments.print_config:
            print(config.to_yaml(), end="")
            return 0
        command = os.environ.get(COMMAND) or resume_command(arguments, config.run.resume)
        if arguments.nproc is not None and not launched():
            if arguments.nproc < 1:
                raise ConfigError(f"--nproc {arguments.nproc}: there is at least one rank")
            os.environ[COMMAND] = command
            again = ["train", arguments.config, *arguments.overrides]
            code, why = launch(again, arguments.nproc, arguments.max_restarts, config.parallel.timeout)
            return _fail(why, code) if why else code
        from .loop import train

        outcome = train(config, command)
    except (ConfigError, CheckpointError) as error:
        return _fail(str(error), 2)
    except TrainingStopped as error:
        return _fail(str(error), 1)
    if outcome.interrupted:
        return 128 + outcome.interrupted
    if outcome.summary is None:
        return 0
    print(f"\n{outcome.summary.table()}\n\ntable    {outcome.summary.table_path}\npicture  {outcome.summary.picture_path}")
    return 0


def _import_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="FOLDER", help="a transformers model on this machine")
    parser.add_argument(
        "settings", metavar="key=value", nargs="+", help="out=PATH, a new folder; balancers=..., to train it with"
    )


def _import(arguments: argparse.Namespace) -> int:
    import yaml

    from .errors import ConfigError
    from .hugging_face import import_hf

    settings = dict(setting.partition("=")[::2] for setting in arguments.settings)
    if unknown := [key for key in settings if key not in ("out", "balancers")]:
        return _fail(f"import: {unknown[0]!r}: write out=PATH and, if you like, balancers=...", 2)
    if not settings.get("out"):
        return _fail("import: give the new folder as out=PATH", 2)
    try:
        balancers = yaml.safe_load(settings["balancers"]) if "balancers" in settings else None
        print(import_hf(Path(arguments.source), Path(settings["out"]), balancers))
    except yaml.YAMLError:
        return _fail(f"import: balancers={settings['balancers']}: not valid YAML", 2)
    except ConfigError as error:
        return _fail(str(error), 2)
    return 0


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="RUN", help="a run's folder, or one of its checkpoints")
    parser.add_argument("format", metavar="FORMAT", help="what to write")
    parser.add_argument("out", metavar="out=PATH", nargs="?", default="", help="a new folder for it")


def _export(arguments: argparse.Namespace) -> int:
    from .checkpoint import CheckpointError
    from .errors import ConfigError
    from .export import export

    key, _, path = arguments.out.partition("=")
    if arguments.out and not (key == "out" and path):
        return _fail(f"export: {arguments.out!r}: write it as out=PATH", 2)
    try:
        print(export(Path(arguments.source), arguments.format, Path(path) if path else None))
    except (ConfigError, CheckpointError) as error:
        return _fail(str(error), 2)
    return 0


def resume_command(arguments: argparse.Namespace, resume: str) -> str:
    """The command that continues a run: as it was typed, with run.resume at auto."""
    kept = [override for override in arguments.overrides if not override.startswith("run.resume=")]
    if resume != "auto" or len(kept) < len(arguments.overrides):
        kept.append("run.resume=auto")
    if arguments.nproc is not None:
        kept += ["--nproc", str(arguments.nproc)]
    if arguments.max_restarts:
        kept += ["--max-restarts", str(arguments.max_restarts)]
    typed = sys.argv[0]
    program = [typed] if Path(typed).stem == "evenload" and typed != shutil.which("evenload") else ["evenload"]
    if typed.endswith(".py"):
        program = [sys.executable, "-m", "evenload.train.cli"]
    return shlex.join([*program, "train", arguments.config, *kept])


COMMANDS = {
    "train": Command("pretrain a GPT-MoE", TRAIN_HELP, _train_arguments, _train),
    "compare": Command("train balancers side by side", COMPARE_HELP, compare_arguments, compare),
    "describe": Command("what a configuration needs before it runs", DESCRIBE_HELP, describe_arguments, describe),
    "import": Command("read a Hugging Face transformers model", IMPORT_HELP, _import_arguments, _import),
    "export": Command("write a checkpoint in another format", EXPORT_HELP, _export_arguments, _export),
    "eval": Command("score a checkpoint on tasks of lm-eval", EVAL_HELP, eval_arguments, evaluate),
    "check": Command("run the conformance suite against a router", CHECK_HELP, check_arguments, check),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit code: 0 done, 1 stopped, 2 a wrong configuration, 128 + n ended by signal n."""
    parser = argparse.ArgumentParser(prog="evenload", description="Evenly loaded mixture-of-experts pretraining.")
    parser.add_argument("--version", action="version", version=f"evenload {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        sub = subparsers.add_parser(
            name,
            help=command.help,
            description=command.help,
            epilog=command.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.arguments(sub)
    parsed, late = parser.parse_known_args(arguments)
    # argparse closes a list of positional arguments at the first option behind it.
    if unknown := [word for word in late if word.startswith("-") or "overrides" not in parsed]:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if late:
        parsed.overrides += late
    try:
        return COMMANDS[parsed.command].run(parsed)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)


def _fail(message: str, code: int) -> int:
    if int(os.environ.get("RANK", 0)):
        # What all ranks fail at, the first one says, and the launcher ends the others meanwhile.
        time.sleep(GRACE)
    print(f"evenload: error: {message}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
