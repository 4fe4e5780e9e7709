"""Pretrain LLaMA with stock Megatron-Core, and go on when processes die.

Takes all of Megatron's flags, plus ``--ft-*``. Several processes are started by
``megatron-ft-run -n N pretrain_llama_ft.py ...``; one process needs no launcher.
"""

import sys
import time

PROGRAM_START = time.time()

from megatron_ft.runtime import main  # noqa: E402  the clock starts before the heavy imports

if __name__ == "__main__":
    sys.exit(main(program_start=PROGRAM_START))
