"""What is looked at, or broken on purpose, in the ranks of a campaign; tools/campaign_rank.py.

Each hook wraps a method from outside, in the ranks that are asked to by the environment. Production
code knows nothing of them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import resource
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

NAMES = "FT_CAMPAIGN_HOOKS"
"""Which hooks, separated by commas."""
FOLDER = "FT_CAMPAIGN_DUMPS"
"""Where they write down what they see."""


def census() -> None:
    """Write down, after every step, what this process holds of things that could leak."""
    import torch.distributed as dist

    from megatron_ft.session import Session
    from megatron_ft.world import registry

    directory = Path(os.environ[FOLDER])
    original = Session.step_begins

    @functools.wraps(original)
    def step_begins(self: Session) -> Any:
        assert self.world is not None
        process = self.world.process
        counts = {
            "epoch": self.epoch,
            "iteration": self.iteration,
            "groups": len(registry.live_groups()),
            "torch_groups": len(dist.distributed_c10d._world.pg_map),
            "threads": sorted(_threads()),
            "files": sorted(_open_files()),
            "resident": _resident(),
        }
        with open(directory / f"census-{process}.jsonl", "a") as file:
            file.write(json.dumps(counts) + "\n")
        return original(self)

    Session.step_begins = step_begins  # type: ignore[method-assign]


def _threads() -> Iterator[str]:
    """Names of Python's threads, and the numbers of those that others have started."""
    named = {thread.native_id: thread.name for thread in threading.enumerate()}
    for handle in os.listdir("/proc/self/task"):
        yield named.get(int(handle), handle)


def _open_files() -> Iterator[str]:
    for handle in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            yield os.readlink(handle)


def _resident() -> int:
    """Bytes of memory that are this process's own and present; not the pages of files."""
    present, of_files = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return (present - of_files) * resource.getpagesize()


def weights() -> None:
    """At the end of training, write down what this process's slot holds: weights and optimizer."""
    import hashlib

    import torch

    from megatron_ft.session import Session

    directory = Path(os.environ[FOLDER])
    original = Session.train_ended

    def of(value: Any, into: Any) -> None:
        if isinstance(value, torch.Tensor):
            into.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                of(value[key], into)
        elif isinstance(value, list | tuple):
            for item in value:
                of(item, into)

    @functools.wraps(original)
    def train_ended(self: Session) -> None:
        original(self)
        assert self.world is not None
        if self.world.slots and self.committed:
            digest = hashlib.sha256()
            of([p.data for chunk in self.model for p in chunk.parameters()], digest)
            of(self.optimizer.state_dict(), digest)
            text = json.dumps({"committed": self.committed, "digest": digest.hexdigest()})
            (directory / f"weights-{self.world.slots[0]}.json").write_text(text)

    Session.train_ended = train_ended  # type: ignore[method-assign]


def leak() -> None:
    """A group and a file more at each repair."""
    import torch.distributed as dist

    from megatron_ft.world.world import World

    original = World._install
    kept = []

    @functools.wraps(original)
    def install(self: World, outcome: Any) -> None:
        original(self, outcome)
        kept.append(os.dup(0))
        kept.append(dist.new_group([self.label], use_local_synchronization=True))

    World._install = install  # type: ignore[method-assign]


def no_restore() -> None:
    """Buckets that were reduced with the dead are taken for local gradients."""
    from megatron_ft.recover.buckets import BucketSnapshots

    def restore(self: BucketSnapshots, epoch: int) -> int:
        self.drop()
        return 0

    BucketSnapshots.restore = restore  # type: ignore[method-assign]


LOOKS: dict[str, Callable[[], None]] = {"census": census, "weights": weights}
SABOTAGE: dict[str, Callable[[], None]] = {"leak": leak, "no-restore": no_restore}


def run_after_start(hooks: Sequence[str], known: Mapping[str, Callable[[], None]]) -> None:
    """Run hooks once this process is connected, before Megatron is imported."""
    from megatron_ft import runtime

    original = runtime._live

    @functools.wraps(original)
    def live(*args: Any, **kwargs: Any) -> Any:
        for hook in hooks:
            known[hook]()
        return original(*args, **kwargs)

    runtime._live = live
