"""Parses flags as pretrain_llama_ft.py would, and starts nothing."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence

from megatron_ft.arguments import FtArgumentError, early, provider
from megatron_ft.faults.plan import plan_from_flags


@functools.cache
def parser(has_gpu: bool) -> argparse.ArgumentParser:
    """Megatron's own parser with ours in it."""
    from megatron.training.arguments import add_megatron_arguments

    made = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(made)
    return provider(has_gpu=has_gpu, default_backend="ulfm")(made)


def parse(flags: Sequence[str], *, has_gpu: bool = False) -> argparse.Namespace:
    """The flags as Megatron sees them.

    Raises:
        AssertionError: A flag or value is unknown, or a fault is malformed.
    """
    try:
        early(flags)
        args = parser(has_gpu).parse_args(list(flags))
    except (FtArgumentError, SystemExit) as error:
        raise AssertionError(f"refused: {error}: {' '.join(flags)}") from error
    plan_from_flags(args.ft_fault, args.ft_fault_file, args.ft_fault_rate, args.ft_fault_seed)
    return args
