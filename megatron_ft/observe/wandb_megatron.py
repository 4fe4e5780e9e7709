"""Megatron's own wandb writer and this package's are one run.

Megatron opens a run of its own on the last rank and keeps the `wandb` module itself as its writer
(`megatron.training.global_vars._set_wandb_writer`). The object here takes the module's place, in
every process: true only where the job's run is open, so that Megatron's `if wandb_writer:` follows
the elected writer from process to process.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from megatron_ft.observe.wandb_log import WandbLog, WandbSettings


def settings_from_megatron(args: Any) -> WandbSettings | None:
    """Megatron's `--wandb-*` flags; None without `--wandb-project`.

    Raises:
        ValueError: a project without `--wandb-exp-name`, as in Megatron.
    """
    if not getattr(args, "wandb_project", None):
        return None
    if not args.wandb_exp_name:
        raise ValueError("--wandb-project needs --wandb-exp-name, the name of the run in wandb")
    config = dict(vars(args))
    if config.get("kitchen_config_file") is not None:
        config["kitchen_config_file_contents"] = Path(config["kitchen_config_file"]).read_text()
    return WandbSettings(
        project=args.wandb_project,
        name=args.wandb_exp_name,
        entity=args.wandb_entity or None,
        directory=Path(args.wandb_save_dir) if args.wandb_save_dir else None,
        config=config,
    )


class MegatronWriter:
    """What Megatron gets as its wandb writer: the parts of the wandb module that it uses."""

    def __init__(self, wandb_log: WandbLog) -> None:
        self._wandb_log = wandb_log

    def __bool__(self) -> bool:
        return self._wandb_log.active

    def __eq__(self, other: object) -> bool:
        # Megatron's timers tell a wandb writer from a TensorBoard one by `writer == wandb`.
        return other is self or (other is not None and other is sys.modules.get("wandb"))

    def __hash__(self) -> int:
        return id(self)

    def log(self, data: dict[str, Any], step: int) -> None:
        """Log under Megatron's names, with the iteration as step metric instead of wandb's step."""
        self._wandb_log.log(data, step)

    def finish(self) -> None:
        """Nothing: the run ends with the job, after the summary, not with Megatron's loop."""

    @property
    def run(self) -> Any:
        return self._wandb_log.run

    @property
    def config(self) -> _Config:
        return _Config(self._wandb_log.run.config)

    def __getattr__(self, name: str) -> Any:
        """Classes such as `Artifact` come from the module."""
        import wandb

        return getattr(wandb, name)


class _Config:
    """The run's config as Megatron updates it; a later start of the job may change values."""

    def __init__(self, config: Any) -> None:
        self._config = config

    def update(self, values: dict[str, Any]) -> None:
        self._config.update(values, allow_val_change=True)
