"""Kill slots of a four-slot job for real and look at what the groups mean to the survivors.

Slot 2 dies while the others are in an operation; then slot 0, the lowest, dies between operations.
After each the survivors revoke, drain, shrink, and put new links into the old groups.

Arguments: a directory for the findings.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from compare import difference
from mpi4py import MPI

from megatron_ft.world.backend import PlainPolicy, UlfmProcessGroup, register
from megatron_ft.world.errors import WorldBroken
from megatron_ft.world.link import Link
from megatron_ft.world.pending import nothing, settle
from megatron_ft.world.policy import Body
from megatron_ft.world.registry import live_groups

SLOT = MPI.COMM_WORLD.rank
NUM_SLOTS = 4
found: dict[str, str | None] = {}


def expect(name: str, got: Any, expected: Any) -> None:
    found[name] = difference(got, expected)


def kind_of(call: Callable[[], Any]) -> str | None:
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return None


class Job:
    """The living processes; a process is its first slot for ever."""

    def __init__(self) -> None:
        self.comm = MPI.COMM_WORLD.Dup()
        self.comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.process_of: list[int | None] = list(range(NUM_SLOTS))

    def repair(self) -> None:
        for group in live_groups():
            if group.link.comm is not None and not group.link.comm.Is_revoked():
                group.link.comm.Revoke()
        for group in live_groups():
            group.drain()
        self.comm = self.comm.Shrink()
        self.comm.Set_errhandler(MPI.ERRORS_RETURN)
        alive = self.comm.allgather(SLOT)
        self.process_of = [slot if slot in alive else None for slot in range(NUM_SLOTS)]
        self.connect()

    def connect(self) -> None:
        mine = {key for group in live_groups() if (key := group.key)}
        for key in sorted(set().union(*self.comm.allgather(mine))):
            part = self.comm.Split(0 if key in mine else MPI.UNDEFINED, SLOT)
            if key not in mine:
                continue
            part.Set_errhandler(MPI.ERRORS_RETURN)
            comm = None if part.size == 1 else part
            (group,) = (g for g in live_groups() if g.key == key)
            group.link = Link.make(key.slots, self.process_of, comm)


class RetryPolicy(PlainPolicy):
    """Run an operation again on the repaired world, from what its buffers held before."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job
        self.retries = 0

    def run(
        self,
        group: UlfmProcessGroup,
        name: str,
        body: Body,
        buffers: Any,
        async_op: bool,
        results: Any = (),
    ) -> Any:
        saved = [buffer.clone() for buffer in buffers]
        try:
            return super().run(group, name, body, buffers, async_op, results)
        except WorldBroken as error:
            found[f"retry_{self.retries}_names_the_operation"] = difference(
                (error.op, error.group), (name, group.group_name)
            )
        if name in ("send", "recv"):
            raise WorldBroken(name, group.group_name, "not to be repeated")
        self.retries += 1
        self.job.repair()
        for buffer, copy in zip(buffers, saved, strict=True):
            buffer.copy_(copy)
        return super().run(group, name, body, buffers, async_op, results)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def requests_in_flight(again: Any) -> tuple[list[Any], list[Any]]:
    """Operations that the coming death leaves hanging, one of each kind; and futures of some."""
    if SLOT == 2:
        return [], []
    reduced = [dist.all_reduce(torch.ones(n), group=again, async_op=True) for n in (3, 500_000)]
    futures = [work.get_future() for work in reduced]
    if SLOT != 3:
        return reduced, futures
    works = [
        dist.irecv(torch.zeros(3), 2, tag=1),  # from the one that dies
        dist.irecv(torch.zeros(3), 0, tag=2),  # from a survivor that never sends
        dist.irecv(torch.zeros(3), tag=3),  # from anybody
        dist.isend(torch.ones(2_000_000), 2, tag=4),
        dist.irecv(torch.zeros(3), 1, tag=5),  # arrives before
    ]
    works[4].wait()
    return works + reduced, futures


def hanging(works: list[Any], futures: list[Any]) -> None:
    kinds = [kind_of(work.wait) for work in works]
    expected = ["WorldBroken"] * 4 + [None] if SLOT == 3 else []
    expect("works_after_drain", kinds, [*expected, "WorldBroken", "WorldBroken"])
    expect("futures_after_drain", [kind_of(f.wait) for f in futures], ["WorldBroken"] * 2)
    expect("nothing_in_flight", sum(len(g._pending) for g in live_groups()), 0)


def after_the_first_death(world: Any, pair: Any) -> None:
    alive, n = [0, 1, 3], NUM_SLOTS
    here = float(SLOT)
    expect("size_and_rank_are_logical", (dist.get_world_size(), dist.get_rank()), (n, SLOT))
    expect("live", world.link.live, (0, 1, 3))

    for op, result in (("SUM", 4.0), ("AVG", 1.0), ("MAX", 3.0), ("MIN", 0.0)):
        for async_op in (False, True):
            tensor = torch.tensor([here])
            work = dist.all_reduce(tensor, getattr(dist.ReduceOp, op), async_op=async_op)
            if async_op:
                work.wait()
            expect(f"all_reduce_{op}_{async_op}", tensor, torch.tensor([result]))
    with dist._coalescing_manager(world, async_ops=True) as manager:
        tensors = [torch.tensor([here]), torch.tensor([here, 1.0]), torch.full((70_000,), here)]
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    sums = [torch.tensor([4.0]), torch.tensor([4.0, 3.0]), torch.full((70_000,), 4.0)]
    expect("coalesced", tensors, sums)

    parts = [torch.full((2,), 9.0) for _ in range(n)]
    expected = [torch.full((2,), float(s)) if s in alive else torch.zeros(2) for s in range(n)]
    dist.all_gather(parts, torch.full((2,), here))
    expect("all_gather", parts, expected)
    for async_op in (False, True):
        whole = torch.full((2 * n,), 9.0)
        work = dist.all_gather_into_tensor(whole, torch.full((2,), here), async_op=async_op)
        if async_op:
            work.wait()
        expect(f"all_gather_into_tensor_{async_op}", whole, torch.cat(expected))
    whole = torch.full((2 * n,), 9.0)
    whole[2 * SLOT : 2 * SLOT + 2] = here
    dist.all_gather_into_tensor(whole, whole[2 * SLOT : 2 * SLOT + 2])
    expect("all_gather_in_place", whole, torch.cat(expected))
    strided = torch.full((n, 2, 2), 9.0)[..., 0]
    dist.all_gather_into_tensor(strided, torch.full((2,), here))
    expect("all_gather_strided", strided.contiguous(), torch.stack(expected))
    uneven = [torch.full((s + 1,), 9.0) for s in range(n)]
    dist.all_gather(uneven, torch.full((SLOT + 1,), here))
    filled = [torch.full((s + 1,), float(s) if s in alive else 0.0) for s in range(n)]
    expect("all_gather_uneven", uneven, filled)

    objects: list[Any] = ["?"] * n
    dist.all_gather_object(objects, {"slot": SLOT})
    known = [{"slot": s} if s in alive else None for s in range(n)]
    expect("all_gather_object", objects, known)
    objects = ["?"] * n
    dist.gather_object({"slot": SLOT}, objects if SLOT == 3 else None, 3)
    expect("gather_object", objects, known if SLOT == 3 else ["?"] * n)

    for root, sender in ((0, 0), (1, 1), (2, 0), (3, 3)):
        tensor = torch.tensor([here])
        dist.broadcast(tensor, root)
        expect(f"broadcast_{root}", tensor, torch.tensor([float(sender)]))
        sent: list[Any] = [f"from {SLOT}"]
        dist.broadcast_object_list(sent, root)
        expect(f"broadcast_object_list_{root}", sent, [f"from {sender}"])

    gathered = [torch.full((1,), 9.0) for _ in range(n)]
    dist.gather(torch.tensor([here]), gathered if SLOT == 1 else None, 1)
    zeros_for_2 = [torch.tensor([float(s) if s in alive else 0.0]) for s in range(n)]
    nines = [torch.full((1,), 9.0) for _ in range(n)]
    expect("gather", gathered, zeros_for_2 if SLOT == 1 else nines)
    dist.gather(torch.tensor([here]), None, 2)
    tensor = torch.tensor([here])
    dist.reduce(tensor, 2)
    expect("reduce_to_the_vacant", tensor, torch.tensor([here]))
    dist.reduce(tensor, 3)
    expect("reduce", tensor, torch.tensor([4.0 if SLOT == 3 else here]))

    output = torch.zeros(1)
    inputs = [torch.tensor([10.0 + s]) for s in range(n)] if SLOT == 3 else None
    dist.scatter(output, inputs, 3)
    expect("scatter", output, torch.tensor([10.0 + SLOT]))
    expect(
        "scatter_from_the_vacant", kind_of(lambda: dist.scatter(output, None, 2)), "RuntimeError"
    )

    refused = [
        lambda: dist.reduce_scatter_tensor(torch.zeros(1), torch.ones(n)),
        lambda: dist.reduce_scatter(torch.zeros(1), [torch.ones(1)] * n),
        lambda: dist.all_to_all_single(torch.zeros(n), torch.ones(n)),
        lambda: dist.all_to_all([torch.zeros(1)] * n, [torch.ones(1)] * n),
    ]
    expect("refused", [kind_of(call) for call in refused], ["NotImplementedError"] * 4)

    broken = [
        lambda: dist.send(torch.ones(1), 2),
        lambda: dist.recv(torch.zeros(1), 2),
    ]
    expect("messages_to_the_vacant", [kind_of(call) for call in broken], ["WorldBroken"] * 2)
    if SLOT == 3:
        dist.send(torch.ones(1), 0, tag=7)
    if SLOT == 0:
        tensor = torch.zeros(1)
        expect("receive_from_any_is_slot_3", dist.recv(tensor, tag=7), 3)
    dist.barrier()
    dist.barrier(async_op=True).wait()
    world.monitored_barrier(timedelta(seconds=20))

    if SLOT == 3:  # alone in the group of slots 2 and 3
        expect("alone", pair.link.comm, None)
        tensors = [torch.tensor([here]), torch.tensor([here])]
        dist.all_reduce(tensors[0], group=pair)
        dist.all_reduce(tensors[1], dist.ReduceOp.AVG, group=pair)
        expect("alone_all_reduce", tensors, [torch.tensor([3.0]), torch.tensor([1.5])])
        whole = torch.full((2,), 9.0)
        dist.all_gather_into_tensor(whole, torch.tensor([here]), group=pair)
        parts = [torch.full((1,), 9.0), torch.full((1,), 9.0)]
        dist.all_gather(parts, torch.tensor([here]), group=pair)
        expect("alone_all_gather", [whole, torch.cat(parts)], [torch.tensor([0.0, 3.0])] * 2)
        tensor = torch.tensor([here])
        dist.broadcast(tensor, 2, group=pair)
        dist.gather(tensor, parts, 3, group=pair)
        expect("alone_gather", torch.cat(parts), torch.tensor([0.0, 3.0]))
        dist.scatter(tensor, [torch.zeros(1), torch.ones(1)], 3, group=pair)
        expect("alone_scatter", tensor, torch.ones(1))
        dist.barrier(group=pair)
        to_dead = kind_of(lambda: dist.send(torch.ones(1), 2, group=pair))
        expect("alone_send", to_dead, "WorldBroken")


def after_the_second_death(world: Any) -> None:
    expect("live_at_last", world.link.live, (1, 3))
    expect("lowest_live", world.link.lowest_live, 1)
    tensor = torch.tensor([float(SLOT)])
    dist.broadcast(tensor, 0)
    expect("broadcast_from_the_dead_lowest", tensor, torch.tensor([1.0]))


def one_process_two_slots(world: Any, job: Job) -> None:
    """Process 3 adopts slot 2: it contributes once, and its part fills both slots."""
    comm = world.link.comm
    world.link = Link.make(world.slots, [None, 1, 3, 3], comm)
    tensor = torch.tensor([float(SLOT)])
    dist.all_reduce(tensor)
    expect("two_slots_all_reduce", tensor, torch.tensor([4.0]))
    whole = torch.full((4,), 9.0)
    dist.all_gather_into_tensor(whole, torch.tensor([float(SLOT)]))
    expect("two_slots_all_gather", whole, torch.tensor([0.0, 1.0, 3.0, 3.0]))
    tensor = torch.tensor([float(SLOT)])
    dist.broadcast(tensor, 2)
    expect("two_slots_broadcast", tensor, torch.tensor([3.0]))
    tensor = torch.zeros(1)
    if SLOT == 1:
        dist.send(torch.ones(1), 2)
    else:
        dist.recv(tensor, 1)
        expect("two_slots_message", tensor, torch.ones(1))
    inputs = [torch.zeros(1)] * 4 if SLOT == 1 else None
    refused = [
        lambda: dist.scatter(torch.zeros(1), inputs, 1),
        lambda: dist.all_to_all_single(torch.zeros(4), torch.ones(4)),
    ]
    expect("two_slots_refused", [kind_of(c) for c in refused], ["NotImplementedError"] * 2)


def started_on_a_revoked_one(world: Any) -> list[str | None]:
    """Open MPI notices some of these at the start and some at the end, and calls some 'other'."""
    calls = [
        lambda: dist.all_reduce(torch.ones(3), async_op=True),
        lambda: dist.all_reduce(torch.ones(50_000), async_op=True),
        lambda: dist.all_gather_into_tensor(torch.ones(12), torch.ones(3), async_op=True),
        lambda: dist.barrier(async_op=True),
        lambda: dist.irecv(torch.ones(3), SLOT),
    ]
    return [kind_of(lambda call=call: call().wait()) for call in calls]


def half_started(world: Any) -> None:
    """A call that fails behind one in flight: what is in flight stays tracked until drained."""
    buffer = torch.zeros(3)

    def body(comm: Any) -> Any:
        def calls() -> Any:
            yield comm.Irecv(buffer.numpy(), 0, 1)
            comm.Revoke()
            yield comm.Barrier()

        return settle(calls(), nothing, (buffer,))

    world.policy = PlainPolicy()
    run = lambda: world.policy.run(world, "odd", body, (), True)  # noqa: E731
    expect("half_started", kind_of(run), "WorldBroken")
    expect("half_started_is_tracked", len(world._pending), 1)
    world.drain()
    expect("half_started_is_drained", len(world._pending), 0)
    expect("started_on_a_revoked_one", started_on_a_revoked_one(world), ["WorldBroken"] * 5)
    world.drain()


def main(directory: Path) -> None:
    faulthandler.dump_traceback_later(100, exit=True)
    job = Job()
    policy = RetryPolicy(job)
    register(policy)
    dist.init_process_group("ulfm", store=dist.HashStore(), rank=SLOT, world_size=NUM_SLOTS)
    world: Any = dist.group.WORLD
    dist.new_group([0, 1])
    pair = dist.new_group([2, 3])
    dist.new_group([1, 2, 3])
    if SLOT == 1:
        dist.send(torch.ones(3), 3, tag=5)
    again = dist.new_group()
    works, futures = requests_in_flight(again)
    dist.barrier()

    if SLOT == 2:
        die()
    tensor = torch.tensor([float(SLOT), 1.0])
    dist.all_reduce(tensor)
    expect("all_reduce_over_a_death", tensor, torch.tensor([4.0, 3.0]))
    expect("repaired_once", policy.retries, 1)
    hanging(works, futures)
    after_the_first_death(world, pair)

    dist.barrier()
    if SLOT == 0:
        die()
    time.sleep(0.2)
    work = dist.all_reduce(torch.ones(70_000), async_op=True)
    expect("async_over_a_death", kind_of(work.wait), "WorldBroken")
    job.repair()
    half = torch.tensor([float(SLOT)], dtype=torch.bfloat16)
    dist.all_reduce(half, dist.ReduceOp.AVG)
    expect("average_after_two_deaths", half, torch.tensor([1.0]).bfloat16())
    after_the_second_death(world)
    one_process_two_slots(world, job)
    half_started(world)
    job.connect()
    dist.destroy_process_group()
    expect("groups_destroyed", live_groups(), ())

    (directory / f"found-{SLOT}.json").write_text(json.dumps(found))
    job.comm.Barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
