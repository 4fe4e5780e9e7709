"""After a restart by the launcher: go on from the newest checkpoint that is whole.

A job may have ended while it was writing, and a disk may have lost a part of what was written. What
can be seen without reading all of it is checked here; a checkpoint whose loading ended a start is
skipped by the next one (``restarts.SKIP``).
"""

from __future__ import annotations

import json
import logging
import os
import re
import zipfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from megatron_ft.restarts import SKIP
from megatron_ft.world.environment import note_loading

logger = logging.getLogger("megatron_ft.resume")

TRACKER = "latest_checkpointed_iteration.txt"
_FOLDER = re.compile(r"iter_(\d{7})")


def choose(save_dir: Path, skip: Collection[int], num_shards: int) -> int | None:
    """The iteration of the newest checkpoint to go on from, None if there is none.

    Args:
        save_dir: Megatron's ``--save``.
        skip: Iterations that earlier starts of the job could not load.
        num_shards: Tensor times pipeline parallel size: files of a ``torch`` checkpoint.
    """
    tracked = _tracked(save_dir)
    for iteration, folder in _newest_first(save_dir):
        if tracked is not None and iteration > tracked:
            continue  # the tracker moves last: this one was being written
        if iteration in skip:
            logger.warning("checkpoint %s is skipped: an earlier start could not load it", folder)
            continue
        fault = fault_of(folder, num_shards)
        if fault is None:
            return iteration
        logger.warning("checkpoint %s is skipped: %s", folder, fault)
    return None


def fault_of(folder: Path, num_shards: int) -> str | None:
    """What is visibly wrong with a checkpoint, None if nothing is."""
    if (folder / "metadata.json").exists() or (folder / ".metadata").exists():
        return _fault_of_torch_dist(folder)
    return _fault_of_torch(folder, num_shards)


def _newest_first(save_dir: Path) -> Iterator[tuple[int, Path]]:
    if not save_dir.is_dir():
        return
    found = [
        (int(m[1]), path) for path in save_dir.iterdir() if (m := _FOLDER.fullmatch(path.name))
    ]
    yield from sorted(found, reverse=True)


def _tracked(save_dir: Path) -> int | None:
    """What the tracker says; None if it is missing or torn, so that every folder is looked at."""
    try:
        return int((save_dir / TRACKER).read_text())
    except (FileNotFoundError, ValueError):
        return None


def _mend_tracker(save_dir: Path, iteration: int) -> None:
    """A torn tracker ends Megatron, although it is told which iteration to load."""
    tracker = save_dir / TRACKER
    if tracker.exists() and _tracked(save_dir) is None:
        logger.warning("%s cannot be read: it says %d from now on", tracker, iteration)
        beside = tracker.with_suffix(".mended")
        beside.write_text(str(iteration))
        beside.replace(tracker)


def _fault_of_torch(folder: Path, num_shards: int) -> str | None:
    files = sorted(folder.glob("mp_rank_*/model_optim_rng.pt"))
    if len(files) != num_shards:
        return f"{len(files)} of {num_shards} files model_optim_rng.pt"
    # A zip file's directory is at its end, so one that is cut short has none.
    broken = [path for path in files if not zipfile.is_zipfile(path)]
    return f"{broken[0]} is cut short" if broken else None


def _fault_of_torch_dist(folder: Path) -> str | None:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    try:
        json.loads((folder / "metadata.json").read_text())
        metadata = FileSystemReader(folder).read_metadata()
    except Exception as error:  # whatever pickle makes of a torn file
        return f"its metadata cannot be read ({type(error).__name__}: {error})"
    ends: dict[str, int] = {}
    for entry in (metadata.storage_data or {}).values():
        ends[entry.relative_path] = max(
            ends.get(entry.relative_path, 0), entry.offset + entry.length
        )
    for name, end in sorted(ends.items()):
        path = folder / name
        if not path.exists():
            return f"{path} is missing"
        if path.stat().st_size < end:
            return f"{path} is cut short: {path.stat().st_size} of {end} bytes"
    common = folder / "common.pt"
    if common.exists() and not zipfile.is_zipfile(common):
        return f"{common} is cut short"
    return None


def go_on_from(iteration: int, args: Any, config: Any) -> None:
    """Make Megatron load this checkpoint of ``--save`` whole, instead of what its flags say."""
    for name, value in {
        "load": args.save,
        "ckpt_step": iteration,
        "pretrained_checkpoint": None,
        # What a first start may want to leave out belongs to a job that goes on.
        "finetune": False,
        "load_optim": True,
        "load_rng": True,
        "no_load_optim": None,
        "no_load_rng": None,
    }.items():
        for holder in (args, config.checkpoint):
            if hasattr(holder, name):
                setattr(holder, name, value)


def restart(world: Any, slot: int | None, args: Any, config: Any) -> None:
    """This start of the job is a restart: choose the checkpoint that it goes on from.

    Collective over the active processes.

    Args:
        world: The processes; None for a single one.
        slot: The slot of this process.
        args: Megatron's parsed flags, changed in place.
        config: What ``pretrain`` takes as configuration, changed alike.
    """
    first = slot == 0
    skip = [int(text) for text in os.environ.get(SKIP, "").split(",") if text]
    shards = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    # With a stock backend nobody can be asked, and all look: the job has ended, nothing changes.
    chosen = choose(Path(args.save), skip, shards) if first or world is None else None
    if world is not None:
        # One process looks: two could see a folder at two moments.
        chosen = world.active.bcast(chosen)
    if chosen is not None:
        go_on_from(chosen, args, config)
        if first:
            _mend_tracker(Path(args.save), chosen)
            note_loading(chosen)
        return
    if first:
        print(f"megatron_ft: no valid checkpoint in {args.save}: restarting from the beginning")
    if args.load is not None and Path(args.load).resolve() == Path(args.save).resolve():
        args.load = config.checkpoint.load = None
