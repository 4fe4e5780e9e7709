"""Keep a job's whole output in a file and show only what a person wants to see of it.

    megatron-ft-run -n 8 pretrain_llama_ft.py ... 2>&1 | python tools/show_run.py run.log

Shown are the lines on progress and incidents, those of the launcher, and why a start was refused;
Megatron's own hundreds of lines are in the file. Steps are shown every ``--every``, so that they
do not drive the incidents off the screen.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.text import Text

_RANK = re.compile(r"^\[\d+\] ")
_STEP = re.compile(r"iteration +(\d+)(?:/(\d+))? \| loss ")
# What megatron_ft and its launcher say; all else is Megatron's, torch's and MPI's.
_OURS = re.compile(r"iteration +\d+(/\d+)? \| |megatron-ft-run: |pretrain_llama_ft\.py: |examples/")
_STYLES = (("died", "bold red"), ("stopped", "red"), ("injecting", "magenta"), ("loss", "cyan"))


class Filter:
    """Decides line by line.

    Args:
        every: show every n-th step, the first and the last.
    """

    def __init__(self, every: int = 1) -> None:
        self._every = every
        self._show_next_step = True

    def shown(self, line: str) -> str | None:
        """What to print of a line of the job's output, None for nothing."""
        text = _RANK.sub("", line.rstrip("\n"))
        if not _OURS.match(text):
            return None
        step = _STEP.match(text)
        if step is None:
            # What a death did to the next step is worth seeing, whatever its number.
            self._show_next_step = True
            return text
        iteration, last = int(step[1]), step[2]
        show = self._show_next_step or iteration % self._every == 0 or step[1] == last
        self._show_next_step = False
        return text if show else None


def relay(source: TextIO, log: TextIO, console: Console, every: int) -> None:
    """Copy ``source`` to ``log`` and what is shown of it to ``console``, to its end."""
    lines = Filter(every)
    for line in source:
        log.write(line)
        log.flush()
        text = lines.shown(line)
        if text is not None:
            style = next((style for word, style in _STYLES if word in text), "")
            console.print(Text(text, style="" if _STEP.match(text) else style))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("log", type=Path, metavar="LOG", help="file for the whole output")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="show every n-th step")
    arguments = parser.parse_args(argv)
    if arguments.every < 1:
        parser.error("--every must be at least 1")
    # Ctrl-C is for the job, which then ends; what it says on the way belongs into the file.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    arguments.log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdin.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    with arguments.log.open("w", errors="backslashreplace") as log:
        relay(sys.stdin, log, Console(highlight=False, soft_wrap=True), arguments.every)
    return 0


if __name__ == "__main__":
    sys.exit(main())
