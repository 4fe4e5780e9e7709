"""A cell: one job of a study, and where its result is kept.

The name on disk is a digest of what decides the result, so that studies share cells (the run
without failures, most of all) and a changed setup never takes an old result for its own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from dataclasses import dataclass
from typing import Any, Literal

from .failures import Start
from .options import Options

Rebuild = Literal["average", "copy", "random"]

ENTRY = "pretrain_llama_ft.py"
STUDY_ENTRY = "tools/convergence_entry.py"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The model and its training: LLaMA on bytes, small enough for one minute on two cores."""

    pipeline: int = 4
    data: int = 1
    iterations: int = 300
    num_layers: int = 8
    hidden: int = 64
    ffn: int = 172
    heads: int = 4
    sequence: int = 64
    samples: int = 32
    """Of a step, over all replicas."""
    micro_batch: int = 8
    lr: float = 2e-3
    min_lr: float | None = None
    """Where a cosine ends; None: the rate is constant, as in CheckFree's experiments."""
    init_std: float | None = None
    """Of the initial weights; None: Megatron's, 0.02, which is that of models of some 1000 hidden
    units and leaves layers of few hidden units next to no part in the sum at first."""
    warmup: int = 10
    eval_interval: int = 25
    eval_iters: int = 8

    @property
    def slots(self) -> int:
        return self.pipeline * self.data

    @property
    def microbatches(self) -> int:
        """Of a replica in a step without failures, G."""
        return self.samples // self.micro_batch // self.data

    @property
    def tokens(self) -> int:
        """Of the whole run."""
        return self.iterations * self.samples * self.sequence

    def flags(self, seed: int, data_prefix: str) -> tuple[str, ...]:
        """Megatron's flags."""
        decay = ["--lr-decay-style", "constant"]
        if self.min_lr is not None:
            decay = ["--lr-decay-style", "cosine", "--min-lr", repr(self.min_lr)]
        return (
            *("--tensor-model-parallel-size", "1"),
            *("--pipeline-model-parallel-size", str(self.pipeline)),
            *("--num-layers", str(self.num_layers), "--hidden-size", str(self.hidden)),
            *("--ffn-hidden-size", str(self.ffn), "--num-attention-heads", str(self.heads)),
            *("--seq-length", str(self.sequence)),
            *("--max-position-embeddings", str(self.sequence)),
            *("--micro-batch-size", str(self.micro_batch)),
            *("--global-batch-size", str(self.samples)),
            *("--train-iters", str(self.iterations)),
            *("--lr", repr(self.lr), *decay, "--lr-warmup-iters", str(self.warmup)),
            *("--weight-decay", "0.0", "--clip-grad", "1.0"),
            *("--tokenizer-type", "NullTokenizer", "--vocab-size", "257"),
            *("--data-path", data_prefix, "--split", "98,1,1"),
            *("--eval-interval", str(self.eval_interval), "--eval-iters", str(self.eval_iters)),
            *("--log-interval", "100", "--seed", str(1234 + seed)),
            *(() if self.init_std is None else ("--init-method-std", repr(self.init_std))),
        )


def setup_of(options: Options, **changes: Any) -> Setup:
    """A setup of what the command line asks for: iterations, learning rate, initial weights."""
    if options.init_std is not None:
        changes = {**changes, "init_std": options.init_std}
    if options.lr is not None:
        changes = {**changes, "lr": options.lr}
        if "min_lr" in changes:
            changes["min_lr"] = options.lr / 10
    return Setup(iterations=options.iterations, **changes)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One job."""

    name: str
    """For people; two cells that differ in nothing else are one."""
    setup: Setup
    seed: int
    flags: tuple[str, ...] = ()
    """The strategy's."""
    faults: tuple[str, ...] = ()
    rebuild: Rebuild = "average"
    """What a lost stage becomes; all but the average exist in these studies only."""
    starts: tuple[Start, ...] = ()
    """With checkpoint and restart: the starts that the draws bring about."""
    save_interval: int = 0
    may_miss: bool = False
    """Whether faults may find their slot vacant and not strike."""
    repetition: int = 0
    """Where times are compared, the same job runs several times."""

    @property
    def key(self) -> str:
        """The name on disk."""
        identity = dataclasses.asdict(self)
        del identity["name"]
        text = json.dumps(identity, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    @property
    def entry(self) -> str:
        return ENTRY if self.rebuild == "average" else STUDY_ENTRY

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the ranks."""
        return {} if self.rebuild == "average" else {"CONVERGENCE_REBUILD": self.rebuild}

    @property
    def needs(self) -> tuple[str, ...]:
        """Our flags that the job is given; a study skips cells whose flags do not exist."""
        return tuple(flag for flag in self.flags if flag.startswith("--ft-"))

    @property
    def processes(self) -> int:
        """Of a launch: for the slots, and spares."""
        spares = [b for a, b in itertools.pairwise(self.flags) if a == "--ft-spares"]
        return self.setup.slots + sum(map(int, spares))

    def num_launches(self) -> int:
        return max(1, len(self.starts))

    def num_iterations(self) -> int:
        """Those that are done, again or not."""
        if not self.starts:
            return self.setup.iterations
        return sum(start.steps(self.setup.iterations) for start in self.starts)

    def describe(self) -> dict[str, Any]:
        """What is kept beside the result."""
        return dataclasses.asdict(self)


def cell_of(name: str, setup: Setup, seed: int, **more: Any) -> Cell:
    """A cell with its seed in its name."""
    return Cell(name=f"{name}, seed {seed}", setup=setup, seed=seed, **more)


def no_failure(setup: Setup, seed: int) -> Cell:
    """The run without failures that the studies of CheckFree share."""
    return cell_of("no failure", setup, seed, flags=("--ft-checkfree",))
