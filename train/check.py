"""`evenload check`: the conformance suite against one or several routers."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

CHECK_HELP = """\
targets:
  evenload:eqb+lei           this library's router with these balancers (or a YAML list of {name: ..., option: ...})
  transformers:mixtral       the stock router of transformers, as installed: mixtral, qwen2_moe, qwen3_moe, olmoe,
                             deepseek_v3, glm4_moe, gpt_oss
  my_module:MyRouter         your router class, Balancer class, or Adapter; see docs/conformance.md

examples:
  evenload check evenload:eqb+lei
  evenload check my_module:MyRouter --rows 1,4,5
  evenload check --markdown evenload:eqb+lei transformers:mixtral > table.md

Exit code: 0 nothing failed, 1 something failed, 2 no such target.
"""


def check_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("targets", metavar="TARGET", nargs="*", help="what to check")
    parser.add_argument("--rows", metavar="N,N", help="these rows only")
    parser.add_argument("--list", action="store_true", help="list the rows and stop")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one JSON list instead of tables")
    form.add_argument("--markdown", action="store_true", help="one Markdown table, targets side by side")


def check(arguments: argparse.Namespace) -> int:
    from ..balancers.conformance import RankPool, run_suite
    from ..balancers.conformance.tables import as_json, failed, list_of_rows, markdown_table, text_table

    if arguments.list:
        print(list_of_rows())
        return 0
    try:
        if not arguments.targets:
            raise ValueError("no target; for instance evenload:eqb+lei (evenload check --help shows more)")
        rows = None if arguments.rows is None else _numbers(arguments.rows)
        adapters = {target: resolve(target) for target in arguments.targets}
        results: dict[str, Any] = {}
        with RankPool() as pool:
            for target, adapter in adapters.items():
                results[target] = run_suite(adapter, rows, pool)
                if not arguments.json and not arguments.markdown:
                    print(text_table({target: results[target]}) + "\n", flush=True)
    except ValueError as error:
        print(f"evenload: error: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps(as_json(results), indent=1))
    if arguments.markdown:
        print(markdown_table(results))
    return 1 if failed(results) else 0


def resolve(target: str) -> Any:
    """The adapter of a target. ValueError, with the remedy, where there is none."""
    from ..balancers.conformance.modules import load_target

    kind, _, name = target.partition(":")
    if kind == "evenload":
        from ..models.conformance import LayerAdapter

        return LayerAdapter(_balancers(name))
    if kind == "transformers":
        from ..models.stock_routers import StockAdapter

        return StockAdapter(name)
    return load_target(target)


def _balancers(text: str) -> Any:
    if not text.lstrip().startswith("["):
        return text
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"evenload:{text} is no YAML list: {str(error).splitlines()[0]}") from error


def _numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(f"--rows {text}; give row numbers with commas, such as 1,4,5") from None
