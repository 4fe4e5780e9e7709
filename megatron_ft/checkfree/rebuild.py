"""A stage that no replica holds any more is made anew from its neighbours.

``rebuild`` runs on the process that takes the slot, ``send_stage`` on each process that it names,
one source after the other. What is averaged are the layers, in fp32 and from fp32 masters where
there are any. Embedding, final norm and output layer come from their twins, exactly and with their
optimizer state. Counters, scheduler and loss scale come from the first source, so that the newcomer
enters training where the others are. Generators of random numbers do not: each stage has its own,
and a neighbour's would repeat its dropout masks.

Tensors travel in chunks with a checksum each, as in ``rejoin.transfer``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from mpi4py import MPI

from megatron_ft import adam
from megatron_ft.checkfree import lr_scale, parts
from megatron_ft.checkfree.options import CheckfreeOptions
from megatron_ft.checkfree.wire import receive, send
from megatron_ft.rejoin import transfer
from megatron_ft.rejoin.transfer import Moved
from megatron_ft.schedule.passage import innermost

if TYPE_CHECKING:
    from megatron_ft.session import Session

logger = logging.getLogger("megatron_ft.checkfree")

REQUEST_TAG = 7111

_OF_THE_STAGE = ("optimizer", "golden", "grad_squares", "rng", "tracker")
"""What ``transfer`` sends to a process of the same stage and a neighbour's has no use for."""


@dataclass(frozen=True)
class From:
    """A process that has what a lost stage is rebuilt from."""

    rank: int
    """Its rank in the communicator."""
    stage: int
    weight: float
    """Its share of the average; all shares add up to 1."""


@dataclass(frozen=True)
class _Request:
    """What a newcomer wants of one source."""

    moments: bool
    """Adam's second moments of the layers."""
    ends: frozenset[str]
    """Parameters outside of layers, as many of them as the source holds too."""


def rebuild(
    session: Session,
    comm: MPI.Intracomm,
    sources: Sequence[From],
    options: CheckfreeOptions,
) -> Moved:
    """Make this process's stage from ``sources``; they run ``send_stage`` meanwhile, in this order.

    Returns:
        What was received.

    Raises:
        TransferCorrupted: A checksum does not match; this process's state is as it was.
        MPI.Exception: A source died; likewise.
    """
    started = time.monotonic()
    assert sources and abs(sum(source.weight for source in sources) - 1) < 1e-6, sources
    stage = _stage()
    for source in sources:
        if abs(source.stage - stage) > 1:
            logger.warning(
                "stage %d is rebuilt from stage %d, %d away: the ones between are lost too",
                *(stage, source.stage, abs(source.stage - stage)),
            )
    lacking = set(parts.ends(session.model))
    average = _Average(parts.layers(session.model))
    ends: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    nbytes = 0
    for source in sources:
        request = _Request(options.optimizer == "average", frozenset(lacking))
        comm.send(request, dest=source.rank, tag=REQUEST_TAG)
        sent, received = receive(comm, source.rank)
        nbytes += received
        average.add(sent["layers"], sent["moments"], source.weight)
        ends.update(sent["ends"])
        lacking -= set(sent["ends"])
        rest = rest or sent["rest"]
    assert not lacking, f"no source of stage {stage} has {sorted(lacking)}"
    _become(session, stage, average, ends, rest, options)
    return Moved(nbytes, time.monotonic() - started)


def send_stage(session: Session, comm: MPI.Intracomm, rank: int) -> Moved:
    """Send to ``rank``, which runs ``rebuild``, what it asks this process for.

    Raises:
        MPI.Exception: The newcomer died.
    """
    started = time.monotonic()
    request: _Request = comm.recv(source=rank, tag=REQUEST_TAG)
    layers, ends = parts.layers(session.model), parts.ends(session.model)
    value = {
        "layers": {name: parts.master(p).detach().float() for name, p in layers.items()},
        "moments": {},
        "ends": {name: _end(session, p) for name, p in ends.items() if name in request.ends},
        "rest": _rest(session, layers),
    }
    if request.moments:
        value["moments"] = {
            name: state["exp_avg_sq"]
            for name, state in _common_states(session, layers).items()
            if "exp_avg_sq" in state
        }
    return Moved(send(comm, rank, value), time.monotonic() - started)


# -- what is averaged ------------------------------------------------------------------------------


class _Average:
    """The weighted sum of what the sources hold of the layers, on the host in fp32."""

    def __init__(self, layers: Mapping[str, torch.nn.Parameter]) -> None:
        self.shapes = {name: p.shape for name, p in layers.items()}
        self.weights: dict[str, torch.Tensor] = {}
        self.moments: dict[str, torch.Tensor] = {}

    def add(
        self,
        weights: Mapping[str, torch.Tensor],
        moments: Mapping[str, torch.Tensor],
        share: float,
    ) -> None:
        assert {name: w.shape for name, w in weights.items()} == self.shapes, "other layers"
        for into, values in ((self.weights, weights), (self.moments, moments)):
            for name, value in values.items():
                part = value.float() * share
                into[name] = into[name] + part if name in into else part


def _become(
    session: Session,
    stage: int,
    average: _Average,
    ends: Mapping[str, Any],
    rest: Mapping[str, Any],
    options: CheckfreeOptions,
) -> None:
    """Make what was received this process's own."""
    for single, steps, scaler in zip(
        parts.optimizers(session.optimizer), rest["group_steps"], rest["scalers"], strict=True
    ):
        for group, count in zip(single.optimizer.param_groups, steps, strict=True):
            if count is not None:
                group["step"] = count
        if scaler is not None:
            single.grad_scaler.load_state_dict(scaler)
    owners = parts.owners(session.optimizer)

    def set_to(p: torch.nn.Parameter, weight: torch.Tensor, state: dict[str, Any]) -> None:
        _set(p, weight)
        single, _ = owners[id(parts.master(p))]
        single.optimizer.state.pop(parts.master(p), None)
        if state:
            single.optimizer.state[parts.master(p)] = state

    for name, p in parts.layers(session.model).items():
        moment = average.moments.get(name)
        set_to(p, average.weights[name], _layer_state(rest, p, moment, options))
    for name, p in parts.ends(session.model).items():
        weight, state = ends[name]
        set_to(p, weight, {key: _like(key, value, p) for key, value in state.items()})
    own = transfer._state(session)
    golden = _golden_of(session, rest["golden"])
    transfer._load(
        session,
        {
            **rest["state"],
            **{key: own[key] for key in _OF_THE_STAGE},
            "golden": golden,
            "grad_squares": {},  # its weights are not those that had a gradient
        },
    )
    setattr(session.args, lr_scale.RECORD, rest["record"])
    uncounted = rest["steps"] if options.optimizer == "reset" else 0
    lr_scale.note(session.args, stage, session.committed, uncounted)


@torch.no_grad()
def _set(parameter: torch.nn.Parameter, value: torch.Tensor) -> None:
    copy = parts.master(parameter)
    copy.data.copy_(value)
    if copy is not parameter:
        parameter.data.copy_(copy.data)


def _layer_state(
    rest: Mapping[str, Any],
    parameter: torch.nn.Parameter,
    moment: torch.Tensor | None,
    options: CheckfreeOptions,
) -> dict[str, Any]:
    """Adam's state of a rebuilt parameter; nothing before the first step of the run.

    Args:
        rest: What the first source tells of its own.
        moment: The averaged second moment, None with ``reset``.
    """
    if not rest["stepped"]:
        return {}
    copy = parts.master(parameter)
    second = torch.zeros_like(copy) if moment is None else moment.to(copy)
    state: dict[str, Any] = {"exp_avg": torch.zeros_like(copy), "exp_avg_sq": second}
    if rest["step"] is not None:  # None where the groups count
        steps = 0 if options.optimizer == "reset" else rest["steps"]
        state["step"] = adam.like(rest["step"], steps)
    return state


def _like(key: str, value: Any, parameter: torch.nn.Parameter) -> Any:
    """A part of an optimizer's state where the optimizer wants it; step counts stay on the host."""
    if key != "step" and isinstance(value, torch.Tensor):
        return value.to(parameter.device)
    return value


# -- what a source tells ---------------------------------------------------------------------------


def _rest(session: Session, layers: Mapping[str, torch.nn.Parameter]) -> dict[str, Any]:
    state = {k: v for k, v in transfer._state(session).items() if k not in _OF_THE_STAGE}
    states = _common_states(session, layers)
    step = next((s["step"] for s in states.values() if "step" in s), None)
    singles = parts.optimizers(session.optimizer)
    group_steps = [[g.get("step") for g in single.optimizer.param_groups] for single in singles]
    counts = [int(step)] if step is not None else [int(c) for cs in group_steps for c in cs if c]
    scalers = [getattr(single, "grad_scaler", None) for single in singles]
    return {
        "state": state,
        "golden": _golden(session),
        "stepped": any(states.values()),
        "step": step,
        "steps": max(counts, default=0),
        "group_steps": group_steps,
        "scalers": [scaler and scaler.state_dict() for scaler in scalers],
        "record": lr_scale.record(session.args),
    }


def _common_states(
    session: Session, layers: Mapping[str, torch.nn.Parameter]
) -> dict[str, dict[str, Any]]:
    """Adam's states of this stage's layers as if all steps of the run were counted."""
    owners = parts.owners(session.optimizer)
    changed = adam.rewritten(parts.optimizers(session.optimizer), lr_scale.uncounted_of)
    states = {id(p): state for _, p, state in changed}
    masters = {name: parts.master(p) for name, p in layers.items()}
    return {
        name: states.get(id(p)) or dict(owners[id(p)][0].optimizer.state.get(p, {}))
        for name, p in masters.items()
    }


def _end(session: Session, parameter: torch.nn.Parameter) -> tuple[torch.Tensor, dict[str, Any]]:
    copy = parts.master(parameter)
    single, _ = parts.owners(session.optimizer)[id(copy)]
    return copy.detach(), dict(single.optimizer.state.get(copy, {}))


def _golden(session: Session) -> dict[str, int]:
    """How often each parameter's gradient becomes ready, by name."""
    names = _names(session)
    return {
        names[param]: count
        for chunk in session.model
        for group in chunk.bucket_groups
        for param, count in group.golden_per_param_grad_ready_counts.items()
    }


def _golden_of(session: Session, counts: Mapping[str, int]) -> list[list[int]]:
    """The same for this stage, as ``transfer`` has it; once for what the source has not."""
    names = _names(session)
    return [
        [counts.get(names[p], 1) if counts else 0 for p in transfer._params(group)]
        for chunk in session.model
        for group in chunk.bucket_groups
    ]


def _names(session: Session) -> dict[torch.nn.Parameter, str]:
    return {p: name for chunk in session.model for name, p in innermost(chunk).named_parameters()}


def _stage() -> int:
    from megatron.core import parallel_state

    stage: int = parallel_state.get_pipeline_model_parallel_rank()
    return stage
