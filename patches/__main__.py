"""``python -m megatron_ft.patches [--check WHEEL_DIR]``: what is changed in Megatron, and why."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from . import catalogue
from .registry import check_source


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m megatron_ft.patches", description=__doc__)
    parser.add_argument(
        "--check",
        type=Path,
        metavar="DIR",
        help="check every target against a megatron-core wheel unpacked in DIR, without importing",
    )
    arguments = parser.parse_args()
    if arguments.check is not None:
        return _check(arguments.check)
    table = Table("patch", "kind", "target", "package", "when", "why", title="megatron_ft patches")
    for area, patches in catalogue.AREAS.items():
        for patch in patches:
            table.add_row(
                patch.name,
                patch.kind,
                patch.target,
                f"{patch.package} {patch.versions}",
                catalogue.WHEN[area],
                patch.reason,
            )
    Console().print(table)
    return 0


def _check(root: Path) -> int:
    if not (root / "megatron" / "core").is_dir():
        print(f"{root} holds no unpacked megatron-core wheel (no megatron/core)", file=sys.stderr)
        return 64
    found = [check_source(patch, root) for patch in catalogue.all_patches()]
    problems = [problem for problem in found if problem]
    for problem in problems:
        print(problem)
    print(f"{len(found)} patches checked, {len(problems)} would have to change")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
