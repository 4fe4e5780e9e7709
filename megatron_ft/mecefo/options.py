"""What of a stage is degraded while one process runs two: the flags, and what they mean."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from megatron_ft.validation import FtArgumentError

DEFAULT_RANK = 32
DEFAULT_SVD_INTERVAL = 100


@dataclass(frozen=True, kw_only=True)
class MecefoOptions:
    """MeCeFO's choices; the defaults are the paper's method (arXiv 2510.16415, section 4)."""

    enabled: bool = False
    """Whether a neighbour adopts a stage at all."""
    skip_attention: bool = True
    """Technique I: the backward pass of a layer's attention goes through the residual only."""
    recompute_ffn: bool = True
    """Technique II: of the FFN only its input is kept; the rest is computed again in backward."""
    low_rank: bool = True
    """Technique III: weight gradients of the FFN's products by way of ``rank`` directions."""
    rank: int = DEFAULT_RANK
    """r: right singular vectors of each shard of an FFN weight. The shard's width if that is less,
    and the gradient is exact then."""
    svd_interval: int = DEFAULT_SVD_INTERVAL
    """tau: steps after which the singular vectors are taken anew."""
    budget: float | None = None
    """Time that a neighbour with two stages may take, in units of one normal stage. What the
    degraded layers leave of it goes to exact attention backward, from the top of the stage down.
    None: none at all, the paper's."""
    memory: float = 1.0
    """What the activations of two stages may take, in units of one normal stage's. The FFN is
    recomputed in the layers that do not fit otherwise. 0: in all layers, the paper's; the gradients
    are the same."""
    quotas: bool = False
    """Whether a replica with a degraded node computes fewer microbatches, by measured speed."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"--ft-mecefo-rank {self.rank}: at least 1")
        if self.svd_interval < 1:
            raise ValueError(f"--ft-mecefo-svd-interval {self.svd_interval}: at least 1 step")
        if self.budget is not None and not 0 < self.budget <= 2:
            raise ValueError(
                f"--ft-mecefo-budget {self.budget}: more than 0 and at most 2, since two stages "
                "without any saving take 2"
            )
        if self.memory < 0:
            raise ValueError(f"--ft-mecefo-memory {self.memory}: at least 0")
        if self.budget is not None and not self.skip_attention:
            raise ValueError(
                "--ft-mecefo-budget buys back exact attention backward, which "
                "--ft-mecefo-no-skip-attention keeps in every layer: give one of them"
            )


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add MeCeFO's flags to Megatron's parser; returns it."""
    group = parser.add_argument_group("MeCeFO", "a neighbour runs the stage of a dead process too")
    group.add_argument(
        "--ft-mecefo",
        action="store_true",
        help="when no process is free, the neighbouring stage's process runs both stages",
    )
    group.add_argument(
        "--ft-mecefo-rank",
        type=int,
        default=DEFAULT_RANK,
        metavar="R",
        help="singular vectors for the weight gradients of the FFN (default: %(default)s)",
    )
    group.add_argument(
        "--ft-mecefo-svd-interval",
        type=int,
        default=DEFAULT_SVD_INTERVAL,
        metavar="STEPS",
        help="steps after which the singular vectors are taken anew (default: %(default)s)",
    )
    group.add_argument(
        "--ft-mecefo-budget",
        type=float,
        default=None,
        metavar="STAGES",
        help="time that two stages may take, in units of one normal stage; what is left of it goes "
        "to exact attention backward (default: none, as in the paper)",
    )
    group.add_argument(
        "--ft-mecefo-memory",
        type=float,
        default=1.0,
        metavar="STAGES",
        help="activations that two stages may keep, in units of one normal stage's; FFNs that do "
        "not fit are recomputed, all of them with 0 (default: %(default)s)",
    )
    group.add_argument(
        "--ft-mecefo-quotas",
        action="store_true",
        help="give a replica with a degraded node fewer microbatches, by measured speed",
    )
    for name, what in (
        ("skip-attention", "compute the backward pass of attention exactly"),
        ("recompute", "keep the activations of the FFN"),
        ("low-rank", "compute the weight gradients of the FFN exactly"),
    ):
        group.add_argument(f"--ft-mecefo-no-{name}", action="store_true", help=what)
    return parser


def from_flags(args: Any) -> MecefoOptions:
    """The options in parsed flags.

    Raises:
        ValueError: A value makes no sense; the message names the flag.
    """
    return MecefoOptions(
        enabled=args.ft_mecefo,
        skip_attention=not args.ft_mecefo_no_skip_attention,
        recompute_ffn=not args.ft_mecefo_no_recompute,
        low_rank=not args.ft_mecefo_no_low_rank,
        rank=args.ft_mecefo_rank,
        svd_interval=args.ft_mecefo_svd_interval,
        budget=args.ft_mecefo_budget,
        memory=args.ft_mecefo_memory,
        quotas=args.ft_mecefo_quotas,
    )


def validate(args: Any, *, simulated: bool) -> None:
    """Check Megatron's parsed flags with MeCeFO's, before anything is built.

    What a layer must be like is checked when there are layers (``refusals``).

    Args:
        args: Megatron's.
        simulated: Whether `degrade` faults are injected, which need no other process.

    Raises:
        FtArgumentError: They cannot work together; the message says what to do.
    """
    try:
        options = from_flags(args)
    except ValueError as error:
        raise FtArgumentError(str(error)) from error
    if not options.enabled:
        if options.quotas:
            raise FtArgumentError("--ft-mecefo-quotas is for degraded nodes: add --ft-mecefo")
        return
    refuse = (
        (
            not args.ft_recover and not simulated,
            "--ft-mecefo needs --ft-recover: a stage is copied from another replica, and a replica "
            "that no neighbour can complete goes dark",
        ),
        (
            args.pipeline_model_parallel_size < 2 and not simulated,
            "--ft-mecefo lets the neighbouring stage's process run two stages: "
            "--pipeline-model-parallel-size of at least 2",
        ),
        (
            args.pipeline_model_parallel_layout is not None,
            "--ft-mecefo counts the layers of each stage: leave out "
            "--pipeline-model-parallel-layout",
        ),
        (
            args.context_parallel_size > 1,
            "--ft-mecefo does not support context parallelism: leave out --context-parallel-size",
        ),
        (
            args.log_params_norm,
            "--ft-mecefo lets a process run two stages, and what Megatron sums over each stage's "
            "replicas outside of a step would wait for it twice: leave out --log-params-norm",
        ),
        (
            options.quotas and args.ft_recover_policy != "balanced",
            "--ft-mecefo-quotas is a deal of its own: leave out --ft-recover-policy",
        ),
    )
    for wrong, message in refuse:
        if wrong:
            raise FtArgumentError(message)


def nothing_is_adopted(args: Any) -> str | None:
    """Why no neighbour adopts a stage although ``--ft-mecefo`` is on; None where one would.

    The job runs all the same: a replica that loses a process goes dark.

    Args:
        args: Megatron's, validated.
    """
    if not args.ft_mecefo or not args.ft_recover:
        return None
    if args.ft_checkfree_plus:
        return (
            "with --ft-checkfree-plus no neighbour adopts a stage: it could run neither swapped "
            "microbatches nor twins. --ft-checkfree goes with adoption"
        )
    return None
