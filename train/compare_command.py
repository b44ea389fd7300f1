"""`evenload compare`: balancers side by side, as one command."""

from __future__ import annotations

import argparse
import os
import shlex
import sys

COMPARE_HELP = """\
Trains the configuration with each balancer and each seed, with the same initial weights and the same data for all, and writes a
table, curves and the trade-off between loss and balance into one HTML page. What a comparison varies can also be written in the
configuration file, as a section `compare`.

  balancers=[...]    as model.balancers, each: a name such as eqb+lei, or a list of {name: ..., option: ...}
                     (default: none, gshard and the configuration's own)
  seeds=[0,1,2]      (default: [0])
  sweep={...}        values of a balancer's option (lei.coeff) or of the configuration (optim.lr): every combination
  baseline=NAME      what the others are compared with (default: the first)
  jobs=N             runs at a time (default: one per GPU, or one per CPU core and at most 4)
  turns=N            steps of the timing beside the baseline, 0 leaves it out (default: 10)
  out=PATH           folder (default: runs/compare-NAME)

examples:
  evenload compare tiny
  evenload compare tiny 'balancers=[gshard, loss_free, eqb+lei]' 'seeds=[0,1,2]'
  evenload compare tiny 'balancers=[eqb+lei]' 'sweep={lei.coeff: [0.03, 0.1, 0.3]}' run.steps=100

A comparison that was stopped or killed continues when the same command is given again; finished runs are kept.
Exit code: 0, 1 where a run failed, 2 for what cannot be compared, 128 + n when ended by signal n.
"""


def compare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="a YAML file, or the name of a packaged configuration")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="what to compare, and values that replace the file's")


def compare(arguments: argparse.Namespace) -> int:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as in `evenload train`
    from .compare import compare
    from .errors import ConfigError

    try:
        outcome = compare(arguments.config, arguments.overrides)
    except ConfigError as error:
        print(f"evenload: error: {error}", file=sys.stderr)
        return 2
    print(
        f"\n{outcome.table}\n\nreport   {outcome.report}\ntables   {outcome.out / 'results.csv'}, {outcome.out / 'layers.csv'}"
    )
    again = shlex.join(["evenload", "compare", arguments.config, *arguments.overrides])
    if outcome.interrupted:
        print(f"stopped; finished runs are kept, and the others were saved. Continue with:\n  {again}")
        return 128 + outcome.interrupted
    if outcome.failed:
        print(f"evenload: error: {len(outcome.failed)} runs failed; try them again with:\n  {again}", file=sys.stderr)
        return 1
    return 0
