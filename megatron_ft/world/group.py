"""UlfmProcessGroup: torch's process group, over a link that a repair may replace.

Rank and size are those of the slots, whatever lives. This file only turns torch's many signatures
(lists of one tensor, option objects, older overloads) into the operations of ``reductions``,
``gathering``, ``movement`` and ``p2p``.

A blocking call to a process that never answers is not timed: whoever watches the processes makes
the missing one dead or revokes the communicator. ``work.wait(timeout)`` and
``barrier(timeout=...)`` do count.

All members must agree on ``async_op``: MPI matches a blocking collective with no nonblocking one
(barriers excepted, see ``p2p.barrier``). Sparse tensors, and several tensors in one ``allreduce``
call, which gloo sums together, are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from mpi4py import MPI
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.distributed_c10d import Work

from megatron_ft.world import checks, gathering, movement, p2p, reductions, registry
from megatron_ft.world.derive import GroupKey
from megatron_ft.world.link import Link
from megatron_ft.world.policy import PlainPolicy
from megatron_ft.world.work import PendingWork

type Tensors = Sequence[torch.Tensor]
type TensorLists = Sequence[Sequence[torch.Tensor]]

_OPS = (ReduceOp, ReduceOp.RedOpType)
_PRUNE_AT = 64


class UlfmProcessGroup(ProcessGroup):
    """A group of slots.

    Args:
        rank: This process's group rank.
        link: Its communicators now.
        name: torch's name of the group, the same on every member.
        number: Tells groups of the same slots apart.
        policy: Runs the operations.
        timeout: Of ``monitored_barrier`` without one.

    Attributes:
        key: The group as all its members name it.
        link: Replaced by a repair.
        shown_rank: This process's group rank; another one while vacant slots are left out of sight.
    """

    def __init__(
        self,
        rank: int,
        link: Link,
        name: str,
        number: int,
        policy: PlainPolicy,
        timeout: timedelta,
    ) -> None:
        super().__init__(rank, len(link.slots))
        self.shown_rank = rank
        self.key = GroupKey(number, link.slots)
        self.link = link
        self.policy = policy
        self._name = name
        self._desc = "undefined"
        self._timeout = timeout
        self._pending: set[PendingWork] = set()
        self._prune_at = _PRUNE_AT
        self._alone: MPI.Intracomm | None = None
        self._closed = False

    @property
    def number(self) -> int:
        return self.key.number

    @property
    def slots(self) -> tuple[int, ...]:
        """All members, in the order of their group ranks."""
        return self.key.slots

    # -- requests in flight ----------------------------------------------------------------------

    def track(self, work: PendingWork) -> PendingWork:
        """Keep ``work``, and the memory that MPI uses for it, until it is over."""
        self._pending.add(work)
        if len(self._pending) > self._prune_at:
            # Works that nobody waits for: looked at in turn each time their number has doubled.
            for other in list(self._pending):
                other.is_completed()
            self._prune_at = max(_PRUNE_AT, 2 * len(self._pending))
        return work

    def forget(self, work: PendingWork) -> None:
        self._pending.discard(work)

    def drain(self) -> None:
        """End every request in flight; the communicators must be revoked. Raises nothing.

        Those that had arrived are completed, the others' ``wait`` raises ``WorldBroken``.
        """
        for work in list(self._pending):
            work.drain()

    def messages(self) -> MPI.Intracomm:
        """The communicator for point-to-point messages."""
        comm = self.link.p2p or self.link.comm
        if comm is not None:
            return comm
        if self._alone is None:
            self._alone = MPI.COMM_SELF.Dup()
            self._alone.Set_errhandler(MPI.ERRORS_RETURN)
        return self._alone

    # -- reductions ------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = ReduceOp.SUM, timeout: Any = None) -> Work:
        tensor = checks.single("all_reduce", _listed(tensors))
        return reductions.all_reduce(self, tensor, *_reduce_options(opts))

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = ReduceOp.SUM) -> Work:
        for tensor in tensors:
            checks.single("all_reduce", (tensor,))
        return reductions.all_reduce_coalesced(self, tensors, *_reduce_options(opts))

    def reduce(
        self, tensors: Any, opts: Any = 0, op: Any = ReduceOp.SUM, timeout: Any = None
    ) -> Work:
        tensor = checks.single("reduce", _listed(tensors))
        if isinstance(opts, int):
            return reductions.reduce(self, tensor, opts, op, True)
        return reductions.reduce(self, tensor, opts.rootRank, opts.reduceOp, opts.asyncOp)

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = ReduceOp.SUM, timeout: Any = None
    ) -> Work:
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        for parts in inputs:
            checks.length("reduce_scatter", "input tensor", parts, self.size())
        return reductions.reduce_scatter(self, outputs, inputs, *_reduce_options(opts))

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = ReduceOp.SUM
    ) -> Work:
        return reductions.reduce_scatter(self, [output], [[tensor]], *_reduce_options(opts))

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = ReduceOp.SUM
    ) -> Work:
        whole = [[tensor] for tensor in inputs]
        return reductions.reduce_scatter(self, outputs, whole, *_reduce_options(opts))

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # -- movement --------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = 0, timeout: Any = None) -> Work:
        tensor = checks.single("broadcast", _listed(tensors))
        return movement.broadcast(self, tensor, *_root_options(opts))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Work:
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        checks.single("all_gather", inputs)
        return gathering.all_gather(self, outputs, inputs, _async(opts))

    def allgather_coalesced(self, lists: TensorLists, inputs: Tensors, opts: Any = None) -> Work:
        # torch's lists are by group rank, then by tensor.
        checks.length("all_gather", "output tensor", lists, self.size())
        outputs = list(zip(*lists, strict=True))
        checks.length("all_gather", "input tensor", inputs, len(outputs))
        return gathering.all_gather(self, outputs, inputs, _async(opts))

    def all_gather_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> Work:
        return gathering.all_gather_into(self, (output,), (tensor,), _async(opts))

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work:
        return gathering.all_gather_into(self, outputs, inputs, _async(opts))

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Any, inputs: Any, opts: Any = 0, timeout: Any = None) -> Work:
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        tensor = checks.single("gather", inputs)
        return gathering.gather(self, outputs[0] if outputs else (), tensor, *_root_options(opts))

    def scatter(self, outputs: Any, inputs: Any, opts: Any = 0, timeout: Any = None) -> Work:
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        output = checks.single("scatter", outputs)
        return movement.scatter(self, output, inputs[0] if inputs else (), *_root_options(opts))

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        return movement.all_to_all(self, outputs, inputs, _async(opts))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        opts: Any = None,
        timeout: Any = None,
    ) -> Work:
        splits = output_splits, input_splits
        return movement.all_to_all_single(self, output, tensor, *splits, _async(opts))

    alltoall_base = all_to_all_single

    # -- messages and barriers -------------------------------------------------------------------

    def send(self, tensors: Tensors, to: int, tag: int = 0) -> Work:
        return p2p.send(self, checks.single("send", tensors), to, tag)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> Work:
        return p2p.receive(self, checks.single("recv", tensors), source, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        return p2p.receive(self, checks.single("recv", tensors), None, tag)

    def barrier(self, opts: Any = None, timeout: Any = None) -> Work:
        limit = timeout if opts is None else opts.timeout
        work = p2p.barrier(self)
        if not _async(opts):
            work.wait(limit if limit is not None and limit > timedelta(0) else timedelta(0))
        return work

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        p2p.monitored_barrier(self, timeout or self._timeout, wait_all_ranks)

    # -- life ------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Free the communicators; called by ``destroy_process_group`` on every member."""
        if self._closed:
            return
        self._closed = True
        registry.remove(self)
        self.policy.destroyed(self)
        if self._alone is not None:
            self._alone.Free()

    def abort(self) -> None:
        """Free everybody who waits in an operation of this group, and destroy it here."""
        for comm in (self.link.comm, self.link.p2p):
            if comm is not None and not comm.Is_revoked():
                comm.Revoke()
        self.drain()
        self.shutdown()

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    # -- what torch asks of a group --------------------------------------------------------------

    def rank(self) -> int:
        return self.shown_rank

    def size(self) -> int:
        return len(self.link.slots)

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._desc

    def name(self) -> str:
        return "ulfm"

    # The names under which torch's C++ side calls Python.

    def getBackendName(self) -> str:
        return "ulfm"

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._desc

    def setGroupDesc(self, desc: str) -> None:
        self._desc = desc


def _listed(tensors: Any) -> Tensors:
    return (tensors,) if isinstance(tensors, torch.Tensor) else tensors


def _async(opts: Any) -> bool:
    """Older overloads without options return a work to wait for, as torch's own backends do."""
    return getattr(opts, "asyncOp", True)


def _reduce_options(opts: Any) -> tuple[Any, bool]:
    if isinstance(opts, _OPS):
        return opts, True
    return opts.reduceOp, opts.asyncOp


def _root_options(opts: Any) -> tuple[int, bool]:
    return (opts, True) if isinstance(opts, int) else (opts.rootRank, opts.asyncOp)
