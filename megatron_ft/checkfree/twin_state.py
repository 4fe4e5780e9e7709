"""Optimizer state of twins in checkpoints: left out of files, taken from the originals on loading.

In the distributed format (``torch_dist``) twins are replicas of the originals and nothing is to be
done. In the ``torch`` format each stage writes a file of its own, which stays the one that
Megatron's own model would write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_ft.checkfree import parts
from megatron_ft.checkfree.twins import is_twin, shared_parameters, tie

_MASTERS = "fp32_from_fp16_params"


def without_twins(optimizer: Any, saved: Any) -> Any:
    """The state dict of Megatron's optimizer as if there were no twins."""
    singles = parts.optimizers(optimizer)
    if len(singles) > 1:
        return [_without(s, state) for s, state in zip(singles, saved, strict=True)]
    return _without(singles[0], saved)


def _without(single: Any, saved: dict[str, Any]) -> dict[str, Any]:
    order = _order(single)
    kept = [index for index, p in enumerate(order) if not is_twin(p)]
    renamed = {old: new for new, old in enumerate(kept)}
    inner = saved.get("optimizer", saved)
    changed = {
        **inner,
        "state": {renamed[i]: s for i, s in inner["state"].items() if i in renamed},
        "param_groups": [
            {**group, "params": [renamed[i] for i in group["params"] if i in renamed]}
            for group in inner["param_groups"]
        ],
    }
    if inner is saved:
        return changed
    masters = [[p for p in group if not is_twin(p)] for group in saved[_MASTERS]]
    return {**saved, "optimizer": changed, _MASTERS: masters}


def with_twins(single: Any, saved: dict[str, Any]) -> dict[str, Any]:
    """A state dict that has room for the twins of one of Megatron's optimizers; their own state is
    missing in it. The same one, if it has twins already or there are none."""
    order = _order(single)
    inner = saved.get("optimizer", saved)
    known = sum(len(group["params"]) for group in inner["param_groups"])
    originals = [index for index, p in enumerate(order) if not is_twin(p)]
    if known == len(order):
        return saved
    assert known == len(originals), f"{known} parameters saved, {len(originals)} trained"
    groups = single.optimizer.param_groups
    ids = iter(range(len(order)))
    changed = {
        **inner,
        "state": {originals[i] if isinstance(i, int) else i: s for i, s in inner["state"].items()},
        "param_groups": [
            {**old, "params": [next(ids) for _ in group["params"]]}
            for old, group in zip(inner["param_groups"], groups, strict=True)
        ],
    }
    if inner is saved:
        return changed
    masters = []
    for current, loaded in zip(single.fp32_from_float16_groups, saved[_MASTERS], strict=True):
        rest = iter(loaded)
        masters.append([p if is_twin(p) else next(rest) for p in current])
    return {**saved, "optimizer": changed, _MASTERS: masters}


def _order(single: Any) -> list[torch.Tensor]:
    return [p for group in single.optimizer.param_groups for p in group["params"]]


@torch.no_grad()
def restore(models: Sequence[Any], optimizer: Any) -> None:
    """After loading: weights and optimizer state of twins from the originals.

    Collective over each pair of stages.
    """
    tie(models)
    if optimizer is None:
        return
    owners = parts.owners(optimizer)
    for model in models:
        for pair, _, parameter in shared_parameters(model):
            master = parts.master(parameter)
            source = pair.original
            if master is not parameter:
                dist.broadcast(master.data, group=pair.group, group_src=source)
            state = owners[id(master)][0].optimizer.state
            original = dist.get_rank(pair.group) == source
            mine = dict(state.get(master, {})) if original else {}
            tensors = {k: v for k, v in mine.items() if torch.is_tensor(v) and v.dim() > 0}
            shapes = {key: (tuple(t.shape), t.dtype) for key, t in tensors.items()}
            rest = {key: value for key, value in mine.items() if key not in tensors}
            told: list[Any] = [(shapes, rest)]
            dist.broadcast_object_list(told, group=pair.group, group_src=source)
            shapes, rest = told[0]
            for key, (shape, dtype) in shapes.items():
                tensor = tensors.get(key)
                if tensor is None:
                    tensor = torch.empty(shape, dtype=dtype, device=master.device)
                dist.broadcast(tensor, group=pair.group, group_src=source)
                tensors[key] = tensor
            if not original:
                state.pop(master, None)
                if shapes or rest:
                    state[master] = {**rest, **tensors}
