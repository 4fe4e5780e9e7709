"""From the command line to a finished run: start, train, pool, end."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

from megatron_ft import arguments, reentry
from megatron_ft.arguments import (
    EXIT_BAD_FLAGS,
    EXIT_NO_WAY_ON,
    FtArgumentError,
)
from megatron_ft.ending import leave, leave_from_thread, part, write_end
from megatron_ft.faults.spec import FaultSpecError
from megatron_ft.restarts import START
from megatron_ft.starting import Job, agreed_run_dir, import_everything, start, watch_of
from megatron_ft.world.environment import (
    STATUS_FILE,
    local_rank_of,
    rank_environment,
    read_exit_code,
    write_exit_code,
)

logger = logging.getLogger("megatron_ft")

REFUSAL_PATIENCE_S = 20.0


def main(program_start: float | None = None) -> int:
    """Run the job; the exit code is that of docs/run_directory.md."""
    rank_environment()
    first = os.environ["RANK"] == "0"
    has_gpu = _prepare_environment()
    try:
        early = arguments.early(sys.argv[1:])
        job = start(early)
    except ValueError as error:
        return _refuse(error, first)
    try:
        return _run(job, has_gpu, program_start)
    except (FtArgumentError, FaultSpecError) as error:
        if job.newcomer is not None:
            # The job goes on without it, and its exit code is not this process's to write.
            from megatron_ft.rejoin.newcomer import leave as leave_alone

            leave_alone(error)
        return leave(job, _refuse(error, first))


def _prepare_environment() -> bool:
    """Set what must stand before torch is imported; returns whether a GPU may be present."""
    has_gpu = os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/kfd")
    if not has_gpu:
        # Megatron's jit_fuser is torch.compile, and dynamo asks for a CUDA driver.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # Megatron tells users of a machine without Apex and Transformer Engine at every import.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\..*")
    return has_gpu


def _iterations_of_samples(args: Any) -> int | None:
    """The last iteration, which Megatron computes later; None where the batch size changes."""
    if not args.train_samples or args.step_batch_size_schedule is not None:
        return None
    return int(args.train_samples // args.global_batch_size)


def _refuse(error: Exception, speak: bool) -> int:
    if speak:
        print(f"pretrain_llama_ft.py: {error}", file=sys.stderr, flush=True)
        write_exit_code(EXIT_BAD_FLAGS)
        return EXIT_BAD_FLAGS
    # mpirun ends all ranks when the first leaves with a code: the one that says why goes first.
    status = os.environ.get(STATUS_FILE)
    end = time.monotonic() + REFUSAL_PATIENCE_S
    while status and time.monotonic() < end and read_exit_code(Path(status)) is None:
        time.sleep(0.05)
    time.sleep(0.5)
    return EXIT_BAD_FLAGS


# -- the run ---------------------------------------------------------------------------------------


def _run(job: Job, has_gpu: bool, program_start: float | None) -> int:
    from megatron_ft.observe.observer import Observer
    from megatron_ft.observe.rundir import RunDirectory
    from megatron_ft.session import NoWayOn, Session, close_session, open_session

    path, start_name = agreed_run_dir(job)
    run_dir = RunDirectory(path)
    process = job.world.process if job.world is not None else int(os.environ["RANK"])
    observer = Observer(run_dir, process, job=start_name)
    if job.slot == 0:
        run_dir.clear_exit_status()
    session = open_session(Session(job.early, job.world, watch_of(job), observer))
    job.session = session
    session.leave = lambda code, message: leave_from_thread(job, code, message)
    session.part = lambda: part(job)
    if job.world is not None and job.newcomer is None:
        pids = job.world.comm.allgather((process, os.getpid()))
        session.membership.pids = dict(pids)
    if job.newcomer is not None:
        session.membership.newcomer = job.newcomer
        session.iteration = job.newcomer.order.iteration
    _inject_faults(job)
    code, message = 0, ""
    try:
        code = _live(job, has_gpu, program_start)
    except NoWayOn as stop:
        code, message = EXIT_NO_WAY_ON, str(stop)
    except (FtArgumentError, FaultSpecError):
        raise
    except BaseException:
        if job.world is None:
            raise
        # The others must see a death, not a process that leaves half of a collective behind.
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    write_end(job, code, message)
    close_session()
    return leave(job, code)


def _live(job: Job, has_gpu: bool, program_start: float | None) -> int:
    """Train or wait until the job is over; returns Megatron's exit code."""
    from megatron_ft.rejoin.membership import Released
    from megatron_ft.world.errors import ReplicaLost

    membership = job.session.membership
    try:
        if job.slot is None:
            if job.early.exit_signal is not None:
                # Schedulers send it to all processes. It is for those who train to end the job:
                # the death of one that waits would only come in between.
                signal.signal(job.early.exit_signal, signal.SIG_IGN)
            job.slot = _slot_to_build(job)
            os.environ["RANK"] = str(job.slot)
            if job.newcomer is not None or _is_without_gpu(has_gpu):
                os.environ["LOCAL_RANK"] = str(local_rank_of(job.slot))
            job.session.joining = True
            membership.start_building(job.slot)
        try:
            _train(job, has_gpu, program_start)
            code = 0
        except SystemExit as end:  # Megatron's exit conditions
            if not job.session.training and not end.code:
                _complain_of_silent_exit(job)
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        _agree_on_the_end(job)
        return code
    except ReplicaLost as lost:
        # After training, in the last evaluation or save: there is nothing left to come back to.
        logger.info("%s", lost)
        membership.built = None
        with contextlib.suppress(Released):
            while True:
                membership.pool.wait()
                membership.target = None
    except Released:
        pass
    return 0


def _is_without_gpu(has_gpu: bool) -> bool:
    """Whether this spare of the launch has no GPU of its own, so that it takes its slot's."""
    import torch

    return has_gpu and int(os.environ["LOCAL_RANK"]) >= torch.cuda.device_count()


def _complain_of_silent_exit(job: Job) -> None:
    """Megatron leaves with code 0 when it cannot load a checkpoint; nobody should think it trained.

    Raises:
        RuntimeError: Unless the user asked for it with ``--exit-on-missing-checkpoint``.
    """
    if not job.session.args.exit_on_missing_checkpoint:
        raise RuntimeError("Megatron ended before it trained; its own message says why")


def _slot_to_build(job: Job) -> int:
    """For which slot this process of the pool builds; a newcomer has been told before it joins.

    Raises:
        Released: The job is over.
    """
    membership = job.session.membership
    if job.newcomer is not None:
        if (told := job.newcomer.order.slot) is not None:
            return int(told)
        job.newcomer.enter(job.session)
    else:
        # A spare has the time for it now, and not when it is needed.
        import_everything(job.early.tokenizer)
        if membership.warm:
            membership.target = membership.warm_target()
    membership.pool.wait()
    assert membership.target is not None
    return int(membership.target)


def _agree_on_the_end(job: Job) -> None:
    world = job.world
    if world is None:
        return
    job.session.comes_to("end of training")
    while not world.agree(True):
        # Where nobody has anything left to do, no replica must be whole any more.
        if job.session.mend("end of training", {"finished": True}).plan is None:
            return
    job.session.membership.finished = True
    job.session.membership.repair({})


def _inject_faults(job: Job) -> None:
    """Read what faults are asked for; they are checked once Megatron's flags are known.

    Raises:
        FaultSpecError: A fault is malformed.
    """
    from megatron_ft.faults.degrade import degradations_of
    from megatron_ft.faults.injector import Injector
    from megatron_ft.faults.plan import plan_of

    plan = plan_of(job.early.options)
    if not plan:
        return
    if job.world is None:
        raise FtArgumentError("--ft-fault needs the ulfm backend: start with megatron-ft-run")
    world, session = job.world, job.session
    session.fault_plan = plan
    degradations = degradations_of(plan, world.topology)
    if "degrade" in plan.kinds:
        session.degraded_sources.append(degradations.nodes_at)
    # What is drawn from rates has no name beforehand.
    session.faults = [str(spec) for spec in plan.specs]
    # It is degraded since the step began; Megatron's flags have been refused without --ft-mecefo.
    actions: dict[str, Any] = {"degrade": lambda spec: session.mecefo.assert_degraded(spec)}
    if job.early.checkfree.enabled:
        actions["lose-stage"] = lambda spec: session.lose_state(spec.stage)
    session.injector = Injector(
        plan,
        session.observer.log,
        slots=lambda: world.shown.slots_of(world.process),
        stage_of=world.topology.stage_of,
        epoch=lambda: world.epoch,
        num_slots=world.topology.num_slots,
        num_stages=world.topology.pipeline,
        actions=actions,
        strikes={"degrade": degradations.strikes},
    )


def _train(job: Job, has_gpu: bool, program_start: float | None) -> None:
    """Stock Megatron's flow, with our hooks in place."""
    import torch

    from megatron_ft.patches import (
        adam,
        checkfree,
        cpu_device,
        faults,
        mecefo,
        observe,
        recover,
        tokenizers,
        ulfm,
        wheel,
    )
    from megatron_ft.patches.registry import registry

    has_gpu = has_gpu and torch.cuda.is_available()
    if not has_gpu:
        registry.install(cpu_device.PATCHES)
        if job.slot == 0:
            print("no GPU: Megatron's flags for training on the CPU are set", flush=True)

    from megatron.core.enums import ModelType
    from megatron.training import pretrain, set_startup_timestamps

    from megatron_ft import llama

    session = job.session
    registry.install((*wheel.PATCHES, *tokenizers.PATCHES))
    registry.install(observe.PATCHES)
    if session.resilient:
        registry.install(ulfm.VACANCY)
        registry.install(recover.PATCHES)
    if job.early.mecefo.enabled:
        registry.install(mecefo.PATCHES)
    if job.early.mecefo.enabled or job.early.checkfree.enabled:
        registry.install(adam.PATCHES)
    if job.early.checkfree.enabled:
        registry.install(checkfree.PATCHES)
    if session.injector is not None:
        registry.install(faults.PATCHES)
    set_startup_timestamps(program_start=program_start, main_entry=time.time())
    args, config = arguments.parse(
        has_gpu=has_gpu,
        default_backend=job.backend,
        strategy=job.early.strategy,
        gathers_optimizer=job.early.gathers_optimizer,
    )
    session.args = args
    if job.slot == 0 and not session.joining:
        _say_what_is_off(args)
    if session.joining:
        # Its state comes from a live replica, and what the others found in their data is known.
        args.load = args.pretrained_checkpoint = None
        config.checkpoint.load = config.checkpoint.pretrained_checkpoint = None
        args.do_train, args.do_valid, args.do_test = True, args.eval_iters > 0, args.eval_iters > 0
    elif os.environ.get(START, "0") != "0" and args.save:
        from megatron_ft.recover.resume import restart

        restart(job.world, job.slot, args, config)
    if session.injector is not None and job.newcomer is None:  # who started it has checked
        session.fault_plan.check(
            num_slots=args.world_size,
            num_stages=args.pipeline_model_parallel_size,
            train_iters=args.train_iters or _iterations_of_samples(args),
            # Processes that are started later can be named, too.
            num_processes=len(job.world.ids)
            + job.early.options.ft_respawn * job.early.options.ft_respawn_limit,
        )
    if job.world is not None and not session.joining:
        from megatron_ft.world.start_guard import guard_start

        guard_start(job.world, lambda: session.training)
    store = _register_backend(job)
    _install_strategies(job)
    pretrain(
        config,
        llama.datasets_provider,
        ModelType.encoder_or_decoder,
        llama.forward_step,
        store=store,
    )


def _say_what_is_off(args: Any) -> None:
    """One line where flags are on of which a part does nothing together."""
    from megatron_ft.mecefo.options import nothing_is_adopted

    reason = nothing_is_adopted(args)
    if reason is not None:
        print(f"megatron_ft: {reason}; a replica that loses a process goes dark", flush=True)


def _register_backend(job: Job) -> Any:
    """Make the ``ulfm`` backend known; returns the store for torch, which nobody shares."""
    if job.backend != "ulfm":
        return None
    import torch.distributed as dist

    from megatron_ft.patches import ulfm
    from megatron_ft.patches.registry import registry
    from megatron_ft.world.backend import register
    from megatron_ft.world.resilience import ResilientPolicy

    registry.install(ulfm.GROUPS)

    session = job.session
    session.policy = ResilientPolicy(job.world, session.mend, session.watch)
    session.policy.before_unwinding = lambda: reentry.finish_committed_step(session)
    register(session.policy)
    return dist.HashStore()


def _install_strategies(job: Job) -> None:
    session = job.session
    if session.resilient:
        from megatron_ft.recover.install import build_transaction

        session.on_built.append(lambda: build_transaction(session))
        if session.membership.adopts:
            from megatron_ft.adopt.hosting import Hosting

            session.hosting = Hosting(session)
    if session.early.checkfree.enabled:
        from megatron_ft.checkfree.live import install

        session.on_built.append(lambda: install(session))
    if session.early.mecefo.enabled:
        from megatron_ft.mecefo.live import install as install_mecefo

        session.on_built.append(lambda: install_mecefo(session))
