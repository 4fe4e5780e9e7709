"""``python -m megatron_ft.patches [--check DIR]``: what ties this package to Megatron, and why."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from . import catalogue
from .registry import MEGATRON, Patch, Reliance
from .source import check_source


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m megatron_ft.patches", description=__doc__)
    parser.add_argument(
        "--check",
        type=Path,
        metavar="DIR",
        help="check all of it against a megatron-core wheel unpacked in DIR, without importing",
    )
    arguments = parser.parse_args()
    if arguments.check is not None:
        return _check(arguments.check)
    # A pipe has no width of its own, and names cut short are of no use.
    console = Console(width=None if sys.stdout.isatty() else 180)
    for area, items in catalogue.AREAS.items():
        console.print(_table(f"{area}: {catalogue.WHEN[area]}", items))
    return 0


def _table(title: str, items: Iterable[Patch | Reliance]) -> Table:
    table = Table(title=title, title_justify="left", expand=True)
    for heading in ("name", "kind", "target", "of", "why"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "kind")
    for item in items:
        table.add_row(
            item.name, item.kind, item.target, f"{item.package} {item.versions}", item.reason
        )
    return table


def _check(root: Path) -> int:
    if not (root / "megatron" / "core").is_dir():
        print(f"{root} holds no unpacked megatron-core wheel (no megatron/core)", file=sys.stderr)
        return 64
    ours = [item for item in catalogue.everything() if item.package == MEGATRON]
    problems = [problem for item in ours if (problem := check_source(item, root)) is not None]
    for problem in problems:
        print(problem)
    print(
        f"{len(ours)} patches and calls of {MEGATRON} checked, {len(problems)} would have to change"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
