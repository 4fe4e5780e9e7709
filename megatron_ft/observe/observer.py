"""Everything that one process of a job needs to be watched, put together.

Each process has an `Observer` and calls the same methods; what they do depends on whether the
process is the elected writer at that moment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TextIO

from megatron_ft.observe.election import elected_writer
from megatron_ft.observe.event_table import Event
from megatron_ft.observe.events import EventLog
from megatron_ft.observe.progress import Progress
from megatron_ft.observe.rundir import RunDirectory
from megatron_ft.observe.summary import Summary, write_summary
from megatron_ft.observe.wandb_log import WandbLog, WandbSettings


class Observer:
    """Event log, progress lines and wandb run of one process.

    Args:
        run_dir: shared by all processes and all starts of the job.
        process: this process's number.
        job: see `EventLog`.
        wandb: None when the user did not ask for wandb.
        checkpoint_wandb_id: the run id in the checkpoint that training goes on from.
        stream: where progress lines go; standard output by default.
        every: print every n-th step.
    """

    def __init__(
        self,
        run_dir: RunDirectory,
        process: int,
        *,
        job: str = "0",
        wandb: WandbSettings | None = None,
        checkpoint_wandb_id: str | None = None,
        stream: TextIO | None = None,
        every: int = 1,
    ) -> None:
        self.run_dir = run_dir
        self.log = EventLog(run_dir, process, job=job)
        self.progress = Progress(stream, every=every)
        self.wandb = WandbLog(
            run_dir,
            wandb,
            history=self.log.read,
            process=process,
            checkpoint_id=checkpoint_wandb_id,
        )
        self.log.add_listener(self.progress)
        self.log.add_listener(self.wandb)
        # A process that joins late learns the job's sizes now, not in the middle of a repair.
        self.progress.prepare(self.log.of_kind("run_started"))

    def use_wandb(self, settings: WandbSettings, checkpoint_id: str | None = None) -> None:
        """Log to wandb from now on: its settings are known only when Megatron's flags are."""
        self.wandb = WandbLog(
            self.run_dir,
            settings,
            history=self.log.read,
            process=self.log.process,
            checkpoint_id=checkpoint_id,
        )
        self.log.add_listener(self.wandb)
        if self.log.elected:
            self.wandb.start()

    def elect(self, assignment: Mapping[int, int | None]) -> bool:
        """Take or give up the writer's part under a new assignment of slots to processes.

        Milliseconds, whatever wandb does; returns whether this process is the writer now.
        """
        elected = elected_writer(assignment) == self.log.process
        if elected != self.log.elected:
            if elected:
                self.wandb.start()
            else:
                self.wandb.close(timeout_s=0)
            self.log.elect(elected)
        return elected

    def emit(
        self,
        kind: str,
        *,
        iteration: int,
        epoch: int,
        durable: bool = False,
        agreed: str | None = None,
        **fields: Any,
    ) -> Event:
        """See `EventLog.emit`."""
        event = self.log.emit(
            kind, iteration=iteration, epoch=epoch, durable=durable, agreed=agreed, **fields
        )
        self.progress.prepare([event])
        return event

    def finish(
        self, status: str, exit_code: int, message: str = "", *, iteration: int, epoch: int
    ) -> Summary | None:
        """End this start of the job, however it ends.

        The elected writer calls it when the other processes have written their last events. It
        merges the event files and leaves summary.json and exit_status.json; any other process
        only closes its files.

        Args:
            status: `ok`, `degraded` or `stopped`.
            exit_code: the exit code of the job.
            message: for a person, why it stopped and what to do.

        Returns:
            The summary, None in a process that is not the writer.
        """
        if not self.log.elected:
            self.log.close()
            return None
        fields: dict[str, Any] = {"status": status, "exit_code": exit_code}
        if message:
            fields["message"] = message
        self.log.emit("run_finished", iteration=iteration, epoch=epoch, **fields)
        self.log.merge()
        summary = write_summary(self.run_dir)
        self.run_dir.write_exit_status(exit_code, message)
        self.log.close()
        self.wandb.close(summary, exit_code=exit_code)
        return summary
