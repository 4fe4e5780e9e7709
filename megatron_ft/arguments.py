"""The ``--ft-*`` flags, LLaMA's defaults, and what a machine without a GPU needs.

The flags are read twice: early, before torch is imported, by every process of the job, and by
Megatron's own parser, whose help and checks cover them too.
"""

from __future__ import annotations

import argparse
import signal
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from megatron_ft.checkfree import options as checkfree_options
from megatron_ft.checkfree.options import CheckfreeOptions
from megatron_ft.faults.rates import SCENARIOS
from megatron_ft.mecefo import options as mecefo_options
from megatron_ft.mecefo.options import MecefoOptions
from megatron_ft.validation import FtArgumentError as FtArgumentError
from megatron_ft.validation import validate as validate
from megatron_ft.validation import validate_early

LLAMA_DEFAULTS: dict[str, Any] = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "position_embedding_type": "rope",
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "create_attention_mask_in_dataloader": False,
    "dataloader_type": "external",
    "tokenizer_type": "NullTokenizer",
}

CPU_DEFAULTS: dict[str, Any] = {
    "transformer_impl": "local",
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "no_persist_layer_norm": True,
    "bias_swiglu_fusion": False,
    "bias_gelu_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "use_cpu_initialization": True,
}

EXIT_BAD_FLAGS = 64
EXIT_UNFIRED = 65
"""The job did all it should, but a fault that was asked for never struck."""
EXIT_NO_WAY_ON = 75


@dataclass(frozen=True, kw_only=True)
class Early:
    """What a process must know before Megatron parses its flags."""

    tensor: int
    pipeline: int
    context: int
    order: str
    backend: str | None
    """``--distributed-backend`` as given, None if it was not."""
    num_slots: int | None
    """``--ft-world-size``: slots of the job, None for one per process."""
    options: argparse.Namespace
    """The ``ft_*`` options."""
    gathers_optimizer: bool
    """Whether Megatron gathers a sharded optimizer in one file, for which it wants groups of its
    own over host memory."""
    checkfree: CheckfreeOptions
    """How a stage that nobody holds any more is rebuilt."""
    mecefo: MecefoOptions
    """What is degraded where one process runs two stages."""
    tokenizer: str | None
    """``--tokenizer-type``; None where something else than the command line may decide it."""

    @property
    def exit_signal(self) -> signal.Signals | None:
        """What Megatron's ``--exit-signal-handler`` listens for; None without the flag."""
        given = self.options.exit_signal if self.options.exit_signal_handler else None
        return given  # type: ignore[no-any-return]

    @property
    def replica_size(self) -> int:
        return self.tensor * self.pipeline * self.context

    @property
    def strategy(self) -> str | None:
        """The flag of a strategy that is on, for messages; None if training is stock."""
        if self.options.ft_recover:
            return "--ft-recover"
        if self.checkfree.enabled:
            return "--ft-checkfree-plus" if self.checkfree.plus else "--ft-checkfree"
        return "--ft-mecefo" if self.mecefo.enabled else None


def add_ft_flags(parser: argparse.ArgumentParser) -> None:
    """Register the ``--ft-*`` flags."""
    group = parser.add_argument_group("megatron_ft", "training that goes on when processes die")
    add = group.add_argument
    add(
        "--ft-run-dir",
        metavar="DIR",
        help="where events.jsonl, summary.json and wandb files go; default: a new one in runs/",
    )
    add(
        "--ft-world-size",
        type=int,
        metavar="W",
        help="slots of the job; with fewer processes it starts degraded (default: one each)",
    )
    add(
        "--ft-recover",
        action="store_true",
        help="ReCoVer: replicas that lose a process go dark, the others compute its microbatches",
    )
    add(
        "--ft-recover-policy",
        choices=["versatile", "balanced", "adaptive"],
        default="balanced",
        help="how the microbatches of a step are dealt to the replicas that are left",
    )
    add(
        "--ft-recover-replay",
        choices=["exact", "exchangeable"],
        default="exact",
        help="exact: lost microbatches are computed again from the same samples; exchangeable "
        "(the paper's): a spare's own next samples count instead",
    )
    add(
        "--ft-spares",
        type=int,
        default=0,
        metavar="K",
        help="of the processes, so many wait in the pool to take a slot when one falls vacant",
    )
    add(
        "--ft-spare-warm",
        action="store_true",
        help="waiting processes build a stage beforehand, so that they can take its slot at once",
    )
    add(
        "--ft-respawn",
        action="store_true",
        help="start a new process for each one that died; it takes its slot when it is ready",
    )
    add(
        "--ft-respawn-limit",
        type=int,
        default=1000,
        metavar="N",
        help="how many processes the job starts at the most",
    )
    add(
        "--ft-respawn-nice",
        type=int,
        default=5,
        choices=range(20),
        metavar="N",
        help="so much nicer (0 to 19) than those who train a new process is until it has built",
    )
    checkfree_options.add_flags(parser)
    mecefo_options.add_flags(parser)
    add(
        "--ft-no-mpi-fix",
        action="store_true",
        help="leave a known fault of Open MPI 5.0.11 as it is (docs/rejoin.md)",
    )
    add(
        "--ft-watch-timeout",
        type=float,
        default=10.0,
        metavar="S",
        help="a process that gives no sign of life for so many seconds is killed",
    )
    add(
        "--ft-progress-timeout",
        type=float,
        default=120.0,
        metavar="S",
        help="a process whose training does not move for so many seconds is killed",
    )
    add(
        "--ft-collective-timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="a collective that waits for so many seconds is broken off",
    )
    add(
        "--ft-fault",
        action="append",
        default=[],
        metavar="SPEC",
        help="inject a fault: KIND@ITERATION[:slot=N][:point=NAME][:n=K] (docs/faults.md)",
    )
    add("--ft-fault-file", metavar="FILE", help="faults to inject, as YAML")
    add("--ft-fault-rate", action="append", default=[], metavar="RATE", help="e.g. kill:0.02/iter")
    add("--ft-fault-seed", type=int, metavar="SEED", help="of --ft-fault-rate (default 0)")
    add(
        "--ft-stage-failure-rate-per-hour",
        type=float,
        default=0.0,
        metavar="H",
        help="CheckFree's simulation: each stage loses its state with this probability per hour, "
        "0.16 for 16 %%; needs --ft-iteration-seconds",
    )
    add(
        "--ft-mecefo-scenario",
        choices=tuple(SCENARIOS),
        help="MeCeFO's simulation: nodes are degraded as often and as long as in the paper's "
        "scenario of this name; needs --ft-iteration-seconds",
    )
    add(
        "--ft-iteration-seconds",
        type=float,
        metavar="T",
        help="what an iteration takes, for rates per hour (the paper's: 91.3)",
    )


def early(argv: Sequence[str]) -> Early:
    """Read what is needed before torch is imported.

    Raises:
        FtArgumentError: A flag is malformed, or flags do not go together.
        FaultSpecError: A fault is malformed.
    """

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> Any:
            raise FtArgumentError(message)

    parser = Parser(add_help=False, allow_abbrev=False)
    add_ft_flags(parser)
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    parser.add_argument("--context-parallel-size", type=int, default=1)
    parser.add_argument("--use-tp-pp-dp-mapping", action="store_true")
    parser.add_argument("--distributed-backend", default=None)
    parser.add_argument("--use-distributed-optimizer", action="store_true")
    parser.add_argument("--exit-signal-handler", action="store_true")
    parser.add_argument("--exit-signal", default=signal.SIGTERM, type=_signal)
    parser.add_argument("--ckpt-format", default="torch_dist")
    parser.add_argument("--distributed-timeout-minutes", type=float, default=10)
    parser.add_argument("--tokenizer-type")
    parser.add_argument("--use-checkpoint-args", action="store_true")
    parser.add_argument("--yaml-cfg")
    options, _ = parser.parse_known_args(list(argv))
    validate_early(options)
    try:
        checkfree = checkfree_options.from_namespace(options)
        mecefo = mecefo_options.from_flags(options)
    except ValueError as error:
        raise FtArgumentError(str(error)) from error
    return Early(
        tensor=options.tensor_model_parallel_size,
        pipeline=options.pipeline_model_parallel_size,
        context=options.context_parallel_size,
        order="tp-cp-ep-pp-dp" if options.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
        backend=options.distributed_backend,
        num_slots=options.ft_world_size,
        options=options,
        gathers_optimizer=options.use_distributed_optimizer and options.ckpt_format == "torch",
        checkfree=checkfree,
        mecefo=mecefo,
        tokenizer=None
        if options.use_checkpoint_args or options.yaml_cfg
        else options.tokenizer_type,
    )


def _signal(text: str) -> signal.Signals:
    return signal.Signals(int(text)) if text.isdecimal() else signal.Signals[text]


def provider(
    *,
    has_gpu: bool,
    default_backend: str,
    strategy: str | None = None,
    gathers_optimizer: bool = False,
) -> Callable[..., argparse.ArgumentParser]:
    """``extra_args_provider`` for Megatron's ``parse_and_validate_args``.

    Args:
        has_gpu: Whether the flags of a machine without a GPU stay out.
        default_backend: What ``--distributed-backend`` is if the user does not say.
        strategy: The strategy that is on, None for stock training.
        gathers_optimizer: See ``Early``.
    """

    def extra_args_provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        from megatron.core.transformer.enums import AttnBackend

        add_ft_flags(parser)
        action = parser._option_string_actions["--distributed-backend"]
        action.choices = [*(action.choices or ()), "ulfm"]
        action.default = default_backend
        parser.error = _refuse  # type: ignore[method-assign,assignment]
        _set_defaults(parser, LLAMA_DEFAULTS)
        if not has_gpu:
            _set_defaults(parser, CPU_DEFAULTS | {"attention_backend": AttnBackend.unfused})
            _set_defaults(parser, {"use_gloo_process_groups": gathers_optimizer})
        if strategy is not None:
            # Its reruns check one replica's result on the same process; a strategy moves work.
            _set_defaults(parser, {"rerun_mode": "disabled"})
        return parser

    return extra_args_provider


def _refuse(message: str) -> NoReturn:
    raise FtArgumentError(f"{message} (--help lists all flags)")


def parse(**of_provider: Any) -> tuple[Any, Any]:
    """Megatron's and our flags, checked by both.

    Args:
        of_provider: As ``provider`` takes them.

    Returns:
        Megatron's args, and what ``pretrain`` takes as configuration.

    Raises:
        FtArgumentError: What Megatron asks of its flags, or we of ours, does not hold.
    """
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.arguments import parse_and_validate_args

    try:
        args = parse_and_validate_args(extra_args_provider=provider(**of_provider))
        validate(args)
        model_config = gpt_config_from_args(args, model_config_cls=_model_config_class(args))
        config = pretrain_cfg_container_from_args(args, model_config)
    except FtArgumentError:
        raise
    except (AssertionError, ValueError, OSError) as error:
        raise FtArgumentError(f"Megatron refuses the flags: {_words(error)}") from error
    return args, config


def _model_config_class(args: Any) -> type:
    """Megatron's, unless a strategy needs another model."""
    from megatron.training.models.gpt import GPTModelConfig

    if not args.ft_checkfree_plus:
        return GPTModelConfig
    from megatron_ft.checkfree.twins import model_config_class

    return model_config_class(checkfree_options.from_namespace(args))


def _words(error: Exception) -> str:
    """The message of an error, or the condition of an assertion that has none."""
    if str(error):
        return str(error)
    *_, where = traceback.extract_tb(error.__traceback__)
    return f"{where.line} ({Path(where.filename).name}:{where.lineno})"


def _set_defaults(parser: argparse.ArgumentParser, defaults: dict[str, Any]) -> None:
    known = {action.dest for action in parser._actions}
    missing = sorted(set(defaults) - known)
    assert not missing, f"Megatron has no flags {missing}: the defaults need a look"
    parser.set_defaults(**defaults)
