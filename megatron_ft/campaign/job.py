"""From a case, or the setting of a fault-free run, to the command line of a real job."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_ft.campaign import hooks
from megatron_ft.campaign.spec import Case, Model, Setting

ROOT = Path(__file__).resolve().parents[2]
"""The checkout: the ranks run scripts of it."""
SCRIPT = "pretrain_llama_ft.py"
HOOKED_SCRIPT = "tools/campaign_rank.py"


def model_flags(model: Model) -> tuple[str, ...]:
    """What is trained, and how: the same in all campaigns but for its size."""
    return (
        *("--num-layers", str(model.layers), "--hidden-size", str(model.hidden)),
        *("--ffn-hidden-size", str(model.ffn), "--num-attention-heads", str(model.heads)),
        *("--group-query-attention", "--num-query-groups", str(model.query_groups)),
        *("--seq-length", str(model.sequence), "--max-position-embeddings", str(model.sequence)),
        *("--micro-batch-size", "1", "--lr", "2e-3", "--min-lr", "2e-4"),
        *("--lr-decay-style", "cosine", "--clip-grad", "1.0"),
        *("--tokenizer-type", "NullTokenizer", "--vocab-size", "257", "--split", "98,1,1"),
        *("--eval-iters", "2", "--eval-interval", "1000", "--log-interval", "1"),
    )


def setting_command(
    setting: Setting,
    run_dir: Path,
    data_prefix: str,
    *,
    script: str = SCRIPT,
    spares: int = 0,
    more: Sequence[str] = (),
) -> list[str]:
    """The command of a fault-free run, or with ``more`` flags of one with faults."""
    topology = setting.topology
    return [
        *(sys.executable, "-m", "megatron_ft.launcher", "-n", str(topology.num_slots + spares)),
        script,
        *("--tensor-model-parallel-size", str(topology.tensor)),
        *("--pipeline-model-parallel-size", str(topology.pipeline)),
        *("--global-batch-size", str(setting.microbatches * topology.data)),
        *("--train-iters", str(setting.iterations), "--seed", str(setting.seed)),
        *("--data-path", data_prefix, "--ft-run-dir", str(run_dir)),
        *model_flags(setting.model),
        *setting.flags,
        *more,
    ]


def case_command(case: Case, run_dir: Path, data_prefix: str) -> list[str]:
    more = [*case.strategies]
    if case.spares:
        more += ["--ft-spares", str(case.spares)]
    for fault in case.faults:
        more += ["--ft-fault", fault]
    for rate in case.rates:
        more += ["--ft-fault-rate", rate]
    if case.rates:
        more += ["--ft-fault-seed", str(case.fault_seed)]
    script = HOOKED_SCRIPT if case.hooks else SCRIPT
    return setting_command(
        case.setting, run_dir, data_prefix, script=script, spares=case.spares, more=more
    )


def case_environment(case: Case, dumps: Path) -> dict[str, str]:
    """What the hooked script reads."""
    if not case.hooks:
        return {}
    return {hooks.NAMES: ",".join(case.hooks), hooks.FOLDER: str(dumps)}


def punisher_command(case: Case, run_dir: Path, result: Path) -> list[str]:
    punisher = case.punisher
    assert punisher is not None
    return [
        *(sys.executable, "tools/punisher.py", str(run_dir), "--keep-replica"),
        *("--mtbf", str(punisher.mtbf), "--seconds", str(punisher.seconds)),
        *("--seed", str(punisher.seed), "--json", str(result)),
    ]
