"""Parses many command lines with Megatron's own parser, each in a fork, and says what came of it.

    python flags_worker.py CASES.json ANSWERS.json

A case is [number of processes, flags]; its answer is the message of the refusal, or null.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"
os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"

# Once, for all forks.
import megatron.core.tokenizers.text.libraries
import megatron.training.arguments  # noqa: F401

from megatron_ft import arguments
from megatron_ft.faults.spec import FaultSpecError
from megatron_ft.patches import cpu_device
from megatron_ft.patches.registry import registry


def answer(world_size: int, flags: list[str]) -> str | None:
    os.environ.update(RANK="1", WORLD_SIZE=str(world_size), LOCAL_RANK="0")
    sys.argv = ["pretrain_llama_ft.py", *flags]
    try:
        early = arguments.early(flags)
        arguments.parse(has_gpu=False, default_backend="ulfm", strategy=early.strategy)
    except (arguments.FtArgumentError, FaultSpecError) as error:
        return str(error)
    return None


def in_fork(*case: Any) -> Any:
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            text = json.dumps(answer(*case))
        except BaseException:
            text = json.dumps("NO REFUSAL BUT AN ERROR:\n" + traceback.format_exc())
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        text = stream.read()
    os.wait()
    return json.loads(text)


if __name__ == "__main__":
    registry.install(cpu_device.PATCHES)
    cases = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps([in_fork(*case) for case in cases]))
