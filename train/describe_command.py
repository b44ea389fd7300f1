"""`evenload describe`: what a configuration needs, before it runs."""

from __future__ import annotations

import argparse
import json
import sys

DESCRIBE_HELP = """\
Nothing is allocated, read or sent: one optimizer step is rehearsed with tensors that have shapes and no memory, as the first
of world= ranks, with the code that trains. Memory and bytes are counted in it, with every expert equally popular.

  parameters   active: those that one token is multiplied with, so top_k of the experts, and no table that is only looked up
  FLOPs        6 per active weight and token (arXiv 2001.08361), and 6 * layers * heads * head width * seq_len for causal
               attention (half of arXiv 2204.02311, appendix B); what activation checkpointing repeats is not counted
  memory       held: parameters, moments and gradients, and what one forward leaves for its backward; at the peak: all that is
               alive when most is. What libraries, the allocator and operators keep inside comes on top
  sent         bytes that leave a rank: (n - 1) / n of what n ranks gather, scatter or exchange, twice that for an all-reduce

examples:
  evenload describe kolibri_78b world=64
  evenload describe kolibri_78b world=64 parallel.ep=16 run.microbatch=4 run.activation_checkpointing=full
  evenload describe tiny run.device=cpu                  in float32; run.precision=auto is taken to find a GPU otherwise
  evenload describe my.yaml world=8 --json

Exit code: 0, or 2 where the configuration or the layout is impossible.
"""


def describe_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="a YAML file, or the name of a packaged configuration")
    parser.add_argument(
        "overrides",
        metavar="key=value",
        nargs="*",
        help="world=N ranks (default: the fewest that its layout takes), and values that replace the file's",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables, in bytes and FLOPs")


def describe(arguments: argparse.Namespace) -> int:
    from .config_file import load_config
    from .describe import describe
    from .errors import ConfigError

    try:
        worlds = [text for text in arguments.overrides if text.startswith("world=")]
        overrides = [text for text in arguments.overrides if text not in worlds]
        world = _ranks(worlds[-1]) if worlds else None
        description = describe(load_config(arguments.config, overrides), world)
    except ConfigError as error:
        print(f"evenload: error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(description.to_dict(), indent=1) if arguments.json else description.table())
    return 0


def _ranks(text: str) -> int:
    from .errors import ConfigError

    try:
        return int(text.removeprefix("world="))
    except ValueError:
        raise ConfigError(f"override {text!r}: give a number of ranks, such as world=64") from None
