"""The command: read run directories, print the report, write the page."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from megatron_ft.observe.rundir import write_atomic
from megatron_ft.report.load import load_runs
from megatron_ft.report.page import build_page
from megatron_ft.report.terminal import print_report

# The same as that of flags that cannot work: the user has to change the command.
EXIT_USAGE = 64


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        self.print_usage(sys.stderr)
        self.exit(EXIT_USAGE, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 64 for a directory that cannot be reported on."""
    parser = _Parser(
        prog="report.py",
        description="What one or several runs came to, as an HTML page and in the terminal.",
    )
    parser.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE.html",
        help="where the page goes; default report.html in RUN_DIR, for several runs "
        "comparison.html in the first",
    )
    args = parser.parse_args(argv)
    name = "report.html" if len(args.run_dirs) == 1 else "comparison.html"
    output = args.output or args.run_dirs[0] / name
    try:
        runs = load_runs(args.run_dirs)
        page = build_page(runs)
        write_atomic(output, page.encode())
    except (ValueError, OSError) as error:
        # One line: what is missing, or what cannot be read or written.
        print(f"report.py: {error}", file=sys.stderr)
        return EXIT_USAGE
    console = Console(highlight=False)
    print_report(runs, console)
    console.print(Text(f"\nPage: {output} ({len(page.encode()) / 1024:,.0f} KiB)"), soft_wrap=True)
    return 0
