"""The schedule executor beside Megatron's own schedules, on one model in one job.

``pretrain_llama_ft.py`` with Megatron's model, optimizer and training step. Before the first step
of training the cases named in ``EXECUTOR_CASES`` run; each rank writes what they gave to
``EXECUTOR_OUT``. Then the job trains on as usual. ``executor_cases`` has the cases.

With the case ``transaction`` the job's own schedule is the executor, within the step transaction.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from megatron_ft import runtime
from megatron_ft.runtime import main


def run_before_training(names: list[str]) -> None:
    import torch.distributed as dist
    from megatron.training import training

    original = training.train_step
    ran = []

    @functools.wraps(original)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        if not ran:
            ran.append(True)
            from executor_cases import CASES, Megatron

            # Megatron's step without what is around it here: it runs several times per iteration.
            megatron = Megatron(inspect.unwrap(original), *args[:6])
            results = {name: CASES[name](megatron) for name in names}
            out = Path(os.environ["EXECUTOR_OUT"]) / f"rank-{dist.get_rank()}.json"
            out.write_text(json.dumps(results))
        return original(*args, **kwargs)

    training.train_step = train_step


def use_executor() -> None:
    from megatron_ft.schedule.executor import Executor
    from megatron_ft.transaction import StepTransaction

    original = StepTransaction.wrap
    StepTransaction.wrap = lambda self, schedule: original(self, Executor())  # type: ignore[method-assign]


def hook(names: list[str]) -> None:
    original = runtime._install_strategies

    @functools.wraps(original)
    def install(job: Any) -> None:
        original(job)
        if names == ["transaction"]:
            use_executor()
        else:
            run_before_training(names)

    runtime._install_strategies = install


if __name__ == "__main__":
    hook(os.environ["EXECUTOR_CASES"].split(","))
    sys.exit(main())
