"""The command: read campaigns, run them, print the table, write the JSON."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rich.console import Console
from rich.text import Text

from megatron_ft.campaign.job import ROOT, SCRIPT
from megatron_ft.campaign.located import CampaignError
from megatron_ft.campaign.reading import read_campaigns
from megatron_ft.campaign.results import Outcome, print_table, result_json
from megatron_ft.campaign.runner import REFERENCES, Runner
from megatron_ft.campaign.spec import Campaign, Case
from megatron_ft.observe.rundir import write_json

EXIT_FAILED = 1
# The same as that of flags that cannot work: the user has to change the command, or the file.
EXIT_USAGE = 64
CORES_PER_LAUNCH = 8
"""A launch of four to eight ranks keeps about so many cores busy."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(EXIT_USAGE, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 if all passed, 1 if not, 64 for what cannot be run, 130 stopped."""
    options = _parse(argv)
    try:
        if not (ROOT / SCRIPT).is_file():
            raise CampaignError(f"no {SCRIPT} in {ROOT}: campaigns are run in a checkout")
        campaigns = read_campaigns(options.campaigns)
        cases = _chosen(campaigns, options.only)
    except CampaignError as error:
        print(f"campaign.py: {error}", file=sys.stderr)
        return EXIT_USAGE
    if options.list:
        for case in cases:
            print(f"{case.title}{' (control)' if case.is_control else ''}")
        return 0
    # A file or pipe has no width of its own, and names cut short are of no use.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
    runner = Runner(
        options.out,
        options.data_path or _default_data(),
        parallel=options.parallel,
        fresh=options.fresh,
        say=lambda outcome: _say(outcome, console),
    )
    try:
        with _stopped_like_ctrl_c():
            outcomes = runner.run(cases)
    except KeyboardInterrupt:
        console.print(Text("stopped; the same command goes on with what is not done", "yellow"))
        return 128 + signal.SIGINT
    references = list(runner.references.values())
    result = result_json(outcomes, references)
    write_json(options.out / "campaign.json", result)
    console.print()
    print_table(outcomes, references, console)
    console.print(Text(f"JSON: {options.out / 'campaign.json'}"), soft_wrap=True)
    return 0 if result["passed"] else EXIT_FAILED


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(
        prog="campaign.py",
        description="Run jobs with faults for real and compare each with its fault-free run.",
    )
    add = parser.add_argument
    add("campaigns", nargs="+", type=Path, metavar="CAMPAIGN.yaml")
    add(
        "--out",
        type=Path,
        default=Path("runs/campaign"),
        metavar="DIR",
        help="results; what has passed there, with the same code, is not run again "
        "(default: %(default)s)",
    )
    add("--fresh", action="store_true", help="run again what has passed before")
    add("--only", action="append", default=[], metavar="WORDS", help="cases with these in the name")
    add(
        "--parallel",
        type=int,
        default=max(1, (os.cpu_count() or 1) // CORES_PER_LAUNCH),
        metavar="N",
        help="launches at once (default: one for eight cores)",
    )
    add("--data-path", metavar="PREFIX", help="train on this (default: data/ of the checkout)")
    add("--list", action="store_true", help="name the cases and run nothing")
    options = parser.parse_args(argv)
    if options.parallel < 1:
        parser.error(f"--parallel {options.parallel}: at least one launch is needed")
    return options


def _chosen(campaigns: Sequence[Campaign], only: Sequence[str]) -> list[Case]:
    cases = [case for campaign in campaigns for case in campaign.cases]
    if not only:
        return cases
    chosen = [case for case in cases if any(words in case.title for words in only)]
    if not chosen:
        raise CampaignError(
            f"no case has {' or '.join(only)} in its name; --list names those there are"
        )
    return chosen


def _default_data() -> str:
    from megatron_ft.data import prepare_default

    return prepare_default(ROOT / "data")


def _say(outcome: Outcome, console: Console) -> None:
    kept = ", kept from before" if outcome.kept else ""
    what = f"{outcome.campaign}/{outcome.name}"
    if outcome.passed:
        verdict, style = ("red, as it must be" if outcome.control else "passed"), ""
        if outcome.campaign == REFERENCES:
            verdict = "is there"
    else:
        verdict, style = f"FAILED: {outcome.problems[0]}", "red"
    console.print(Text(f"{outcome.seconds:5.0f} s{kept}  {what} {verdict}", style), soft_wrap=True)


@contextlib.contextmanager
def _stopped_like_ctrl_c() -> Iterator[None]:
    """SIGTERM and SIGHUP end what runs, as SIGINT does: jobs have process groups of their own."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = {n: signal.signal(n, interrupt) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
