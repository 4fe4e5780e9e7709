"""CheckFree's choices: the flags, what they mean, and where the method cannot work."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, get_args

from megatron_ft.validation import FtArgumentError

Weight = Literal["grad-norm", "grad-norm-sq", "uniform"]
OptimizerState = Literal["reset", "average"]

RECORD = "ft_checkfree_rebuilt"
"""The attribute of Megatron's args that says which stages were rebuilt; see ``lr_scale``."""
DEFAULT_LR_SCALE = 1.1
DEFAULT_SWAP_SHARE = Fraction(1, 8)
"""The paper's is 1/2; this one was best in ``tools/convergence.py swap-share``."""


@dataclass(frozen=True, kw_only=True)
class CheckfreeOptions:
    """How a lost stage is rebuilt; but for the share as in the paper (arXiv 2506.15461)."""

    enabled: bool = False
    """Whether a stage that every replica has lost is rebuilt from its neighbours."""
    plus: bool = False
    """CheckFree+: swapped microbatches and twins, so that the first and the last stage can be
    rebuilt too. On implies ``enabled``."""
    weight: Weight = "grad-norm"
    """What each neighbour counts: the L2 norm of its gradient in the last committed step, the
    square of that, or the same for both."""
    optimizer: OptimizerState = "reset"
    """What Adam knows of the rebuilt layers: nothing, or the average of the neighbours' second
    moments and their step count."""
    lr_scale: float = DEFAULT_LR_SCALE
    """The learning rate of the rebuilt layers, in units of what it would be."""
    lr_decay_iters: int = 0
    """Iterations in which that factor goes back to 1, linearly; 0: it stays."""
    swap_share: Fraction = DEFAULT_SWAP_SHARE
    """CheckFree+: how many of the microbatches take the swapped route."""

    def __post_init__(self) -> None:
        if self.weight not in get_args(Weight):
            raise ValueError(
                f"--ft-checkfree-weight {self.weight}: one of {', '.join(get_args(Weight))}"
            )
        if self.optimizer not in get_args(OptimizerState):
            raise ValueError(
                f"--ft-checkfree-optimizer {self.optimizer}: "
                f"one of {', '.join(get_args(OptimizerState))}"
            )
        if not 0 < self.lr_scale < float("inf"):
            raise ValueError(f"--ft-checkfree-lr-scale {self.lr_scale}: more than 0")
        if self.lr_decay_iters < 0:
            raise ValueError(
                f"--ft-checkfree-lr-decay-iters {self.lr_decay_iters}: 0 (never) or more"
            )
        if not 0 <= self.swap_share <= 1:
            raise ValueError(f"--ft-checkfree-swap-share {self.swap_share}: from 0 to 1")
        if self.plus and not self.enabled:
            raise ValueError("CheckFree+ is CheckFree too: enabled must be on where plus is")


def share(text: str) -> str:
    """A share of microbatches as people write it: ``1/8``, ``0.125``.

    It stays text in Megatron's args, which checkpoints keep and load without foreign types.
    """
    try:
        Fraction(text)
    except (ValueError, ZeroDivisionError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no share: write a fraction like 1/8 or a decimal like 0.125"
        ) from error
    return text


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add CheckFree's flags to Megatron's parser; returns it."""
    group = parser.add_argument_group(
        "CheckFree", "a stage that every replica has lost is rebuilt from its neighbours"
    )
    add = group.add_argument
    add(
        "--ft-checkfree",
        action="store_true",
        help="rebuild a stage in the middle as the weighted average of its neighbours",
    )
    add(
        "--ft-checkfree-plus",
        action="store_true",
        help="CheckFree+: a share of the microbatches visits the first two and the last two stages "
        "in swapped order, so that these can be rebuilt too; turns --ft-checkfree on",
    )
    add(
        "--ft-checkfree-weight",
        choices=get_args(Weight),
        default="grad-norm",
        help="what each neighbour counts in the average (default: %(default)s)",
    )
    add(
        "--ft-checkfree-optimizer",
        choices=get_args(OptimizerState),
        default="reset",
        help="optimizer state of a rebuilt stage: none, or the average of the neighbours' second "
        "moments with their step count (default: %(default)s)",
    )
    add(
        "--ft-checkfree-lr-scale",
        type=float,
        default=DEFAULT_LR_SCALE,
        metavar="FACTOR",
        help="the learning rate of a rebuilt stage is multiplied by this (default: %(default)s)",
    )
    add(
        "--ft-checkfree-lr-decay-iters",
        type=int,
        default=0,
        metavar="N",
        help="iterations in which that factor goes back to 1; 0 for never (default: %(default)s)",
    )
    add(
        "--ft-checkfree-swap-share",
        type=share,
        default=str(DEFAULT_SWAP_SHARE),
        metavar="SHARE",
        help="CheckFree+: share of the microbatches on the swapped route, like 1/8 or 0.125 "
        "(default: %(default)s)",
    )
    parser.set_defaults(**{RECORD: {}})
    return parser


def from_namespace(options: Any) -> CheckfreeOptions:
    """The options in parsed flags.

    Raises:
        ValueError: A value makes no sense; the message names the flag.
    """
    return CheckfreeOptions(
        enabled=options.ft_checkfree or options.ft_checkfree_plus,
        plus=options.ft_checkfree_plus,
        weight=options.ft_checkfree_weight,
        optimizer=options.ft_checkfree_optimizer,
        lr_scale=options.ft_checkfree_lr_scale,
        lr_decay_iters=options.ft_checkfree_lr_decay_iters,
        swap_share=Fraction(options.ft_checkfree_swap_share),
    )


def validate(args: Any) -> None:
    """Check Megatron's parsed flags with CheckFree's, before anything is built.

    Raises:
        FtArgumentError: They cannot work together; the message says what to do.
    """
    try:
        options = from_namespace(args)
    except ValueError as error:
        raise FtArgumentError(str(error)) from error
    if not options.enabled:
        return
    flag = "--ft-checkfree-plus" if options.plus else "--ft-checkfree"
    for wrong, message in (*_refusals(args), *(_plus_refusals(args) if options.plus else ())):
        if wrong:
            raise FtArgumentError(f"{flag} {message}")
    stages = args.pipeline_model_parallel_size
    if options.plus and stages < 2:
        raise FtArgumentError(
            f"{flag} swaps neighbouring stages: --pipeline-model-parallel-size of at least 2"
        )
    if not options.plus and stages < 3:
        raise FtArgumentError(
            f"{flag} rebuilds stages that have a neighbour on each side: "
            "--pipeline-model-parallel-size of at least 3, or --ft-checkfree-plus, which can "
            "rebuild the first and the last stage too"
        )


def _refusals(args: Any) -> tuple[tuple[bool, str], ...]:
    stages = args.pipeline_model_parallel_size
    return (
        (
            args.virtual_pipeline_model_parallel_size is not None,
            "averages whole stages: leave out the interleaved schedule "
            "(--num-layers-per-virtual-pipeline-stage, --num-virtual-stages-per-pipeline-rank)",
        ),
        (
            any(
                getattr(args, name, None)
                for name in (
                    "decoder_first_pipeline_num_layers",
                    "decoder_last_pipeline_num_layers",
                    "account_for_embedding_in_pipeline_split",
                    "account_for_loss_in_pipeline_split",
                    "pipeline_model_parallel_layout",
                )
            )
            or args.num_layers % stages != 0,
            f"averages stages layer by layer, so that all need as many: {args.num_layers} layers "
            f"on {stages} stages must be the same number each, without flags that split them "
            "unevenly",
        ),
        (
            bool(args.num_experts),
            "does not support mixture of experts: leave out --num-experts",
        ),
        (
            any(
                getattr(args, name, None)
                for name in (
                    "heterogeneous_layers_config_path",
                    "heterogeneous_layers_config_encoded_json",
                    "linear_attention_freq",
                )
            ),
            "averages stages layer by layer, so that all must be alike: leave out "
            "--heterogeneous-layers-config-path and --linear-attention-freq",
        ),
        (
            bool(getattr(args, "mtp_num_layers", None)),
            "does not support multi-token prediction: leave out --mtp-num-layers",
        ),
        (
            bool(getattr(args, "fp8", None) or getattr(args, "fp4", None)),
            "averages weights, not their quantised forms: leave out --fp8-format and --fp4-format",
        ),
        (
            args.use_distributed_optimizer,
            "needs a stage's whole optimizer state on each of its processes: leave out "
            "--use-distributed-optimizer",
        ),
        (
            str(args.optimizer) != "adam",
            f"knows the state of Adam, not that of --optimizer {args.optimizer}",
        ),
    )


def _plus_refusals(args: Any) -> tuple[tuple[bool, str], ...]:
    from megatron_ft.schedule.chunks import REFUSED

    return (
        (
            not args.untie_embeddings_and_output_weights,
            "keeps a twin each of the embedding and of the output layer, so that these must be "
            "two: give --untie-embeddings-and-output-weights",
        ),
        (
            args.position_embedding_type == "learned_absolute",
            "keeps no twin of learned positions: --position-embedding-type rope",
        ),
        (
            bool(getattr(args, "defer_embedding_wgrad_compute", False)),
            "computes the loss on two stages: leave out --defer-embedding-wgrad-compute",
        ),
        (
            getattr(args, "cuda_graph_impl", "none") not in (None, "none"),
            "runs microbatches in another order than CUDA graphs are captured in: leave out "
            "--cuda-graph-impl",
        ),
        *(
            (bool(getattr(args, name, False)), f"does not support {what} ({name})")
            for name, what in REFUSED.items()
        ),
    )
