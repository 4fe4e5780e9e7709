"""Singular vectors and their refresh, fused modules, and parameters held through a step."""

from __future__ import annotations

import sys
import threading
from typing import Any

import mecefo_reference as reference
import pytest
from harness import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import mecefo_model
import torch
from mecefo_layers import groups as groups

from megatron_ft.mecefo import refresh
from megatron_ft.mecefo.basis import right_singular_vectors
from megatron_ft.mecefo.refresh import DELAY, Refresher, is_due
from megatron_ft.mecefo.wgrad import LowRankWgrad

# -- singular vectors ------------------------------------------------------------------------------


def span_difference(basis: torch.Tensor, weight: torch.Tensor, rank: int) -> float:
    """Between projections onto what the basis spans and what ``torch.linalg.svd`` finds."""
    want = torch.linalg.svd(weight.double(), full_matrices=True).Vh[:rank].T
    basis = basis.double()
    return float((basis @ basis.T - want @ want.T).norm() / rank**0.5)


def decaying(rows: int, columns: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """A matrix with singular values 1, 0.9, 0.81, ..."""
    count = min(rows, columns)
    left = torch.linalg.qr(torch.randn(rows, count, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(columns, count, dtype=torch.float64)).Q
    return ((left * 0.9 ** torch.arange(count)) @ right.T).to(dtype)


@pytest.mark.parametrize(("rows", "columns"), [(40, 24), (24, 40)])
@pytest.mark.parametrize("exact_up_to", [1000, 0], ids=["exact", "randomized"])
def test_the_span_is_that_of_the_first_singular_vectors(
    rows: int, columns: int, exact_up_to: int
) -> None:
    torch.manual_seed(0)
    weight = decaying(rows, columns)
    basis = right_singular_vectors(weight, 6, exact_up_to=exact_up_to, power_iterations=30)
    assert basis.shape == (columns, 6)
    assert torch.allclose(basis.T @ basis, torch.eye(6, dtype=torch.float64), atol=1e-10)
    assert span_difference(basis, weight, 6) < 1e-6
    # the bound can tell them from others
    assert span_difference(basis, weight.flip(1), 6) > 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_few_iterations_are_near(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = decaying(200, 300, dtype)
    basis = right_singular_vectors(weight, 16, exact_up_to=0)
    assert basis.dtype is dtype
    best = torch.linalg.svd(weight.float()).S[16:].norm()
    left = weight.float() - weight.float() @ basis.float() @ basis.float().T
    assert float(left.norm() / best) < 1.01
    assert torch.equal(basis, right_singular_vectors(weight, 16, exact_up_to=0))


@pytest.mark.parametrize("rank", [24, 100])
def test_full_rank_is_the_identity(rank: int) -> None:
    basis = right_singular_vectors(torch.randn(8, 24), rank)
    assert torch.equal(basis @ basis.T, torch.eye(24))


# -- refresh ---------------------------------------------------------------------------------------


def test_layers_take_turns() -> None:
    turns = {
        index: [step for step in range(100, 130) if is_due(step, 100, 10, index, 4)]
        for index in range(4)
    }
    assert turns == {0: [110, 120], 1: [102, 112, 122], 2: [105, 115, 125], 3: [107, 117, 127]}


def wgrad() -> LowRankWgrad:
    torch.manual_seed(1)
    return LowRankWgrad(torch.nn.Parameter(torch.randn(20, 12)))


def test_a_refresh_is_used_at_its_step_however_long_it_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The worker is held until the step of use has begun, or is done long before: no difference."""
    found = []
    for slow in (False, True):
        go = threading.Event()
        one = wgrad()
        refresher = Refresher(rank=3, interval=4)
        refresher.now([one])
        first = one.basis
        real = refresh.right_singular_vectors

        def held(*args: Any, _go: Any = go, _real: Any = real, **kwargs: Any) -> torch.Tensor:
            _go.wait(20)
            return _real(*args, **kwargs)

        monkeypatch.setattr(refresh, "right_singular_vectors", held)
        bases = []
        for step in range(10):
            if not slow:
                go.set()
            elif step % 4 == DELAY:
                threading.Timer(0.2, go.set).start()
            refresher.begin_step(step, 0, 0, 1, [one])
            if slow and step % 4 == 0:
                go.clear()
            bases.append(one.basis)
            with torch.no_grad():  # the optimizer
                one.weight.add_(torch.randn(20, 12, generator=torch.Generator().manual_seed(step)))
        go.set()
        refresher.close()
        monkeypatch.setattr(refresh, "right_singular_vectors", real)
        assert all(basis is first for basis in bases[: 4 + DELAY])
        assert bases[4 + DELAY] is not first
        found.append(bases)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_snapshot_is_that_of_its_step() -> None:
    one = wgrad()
    refresher = Refresher(rank=3, interval=2)
    refresher.now([one])
    for step in range(2 + DELAY + 1):
        if step == 2:
            want = right_singular_vectors(one.weight, 3)
        refresher.begin_step(step, 0, 0, 1, [one])
        with torch.no_grad():
            one.weight.copy_(torch.randn(20, 12))
    refresher.close()
    assert one.basis is not None and torch.equal(one.basis, want)


# -- Transformer Engine's modules ------------------------------------------------------------------


class Fused(torch.nn.Module):
    """What of Transformer Engine's fused modules is read, and no more: it cannot be here."""

    def __init__(self, config: Any, wide: int, narrow: int, *, norm: bool, bias: bool) -> None:
        super().__init__()
        self.config = config
        self._tp_group = torch.distributed.group.WORLD
        self.use_bias = self.te_return_bias = bias
        self.weight = torch.nn.Parameter(torch.randn(wide, narrow, dtype=torch.float64))
        self.bias = torch.nn.Parameter(torch.randn(wide, dtype=torch.float64))
        if norm:
            self.layer_norm_weight = torch.nn.Parameter(torch.randn(narrow, dtype=torch.float64))
            self.layer_norm_bias = torch.nn.Parameter(torch.randn(narrow, dtype=torch.float64))


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("centered", [False, True])
def test_the_arithmetic_that_takes_transformer_engines_place(
    kind: str, centered: bool, again: bool
) -> None:
    """Norm, products, biases and gradients are those of the reference layer."""
    from functools import partial

    from megatron_ft.mecefo import te
    from megatron_ft.mecefo.linear import Product
    from megatron_ft.mecefo.ready import GradReady

    torch.manual_seed(2)
    config = mecefo_model.config(normalization=kind, layernorm_zero_centered_gamma=centered)
    first = Fused(config, 24, 16, norm=True, bias=kind == "LayerNorm")
    second = Fused(config, 16, 24, norm=False, bias=kind == "LayerNorm")
    wgrads = [LowRankWgrad(first.weight), LowRankWgrad(second.weight)]
    for wgrad in wgrads:
        wgrad.set_basis(right_singular_vectors(wgrad.weight, 5))
    make = [
        partial(Product, weight=wgrad.weight, wgrad=wgrad, ready=GradReady()) for wgrad in wgrads
    ]
    x = torch.randn(6, 2, 16, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(6, 2, 16, dtype=torch.float64)
    y1, bias = te.forward_first(first, x, make[0])
    x2 = torch.nn.functional.gelu(y1 if bias is None else y1 + bias)
    y2, bias2 = te.forward_second(second, x2, make[1], again=again)
    (y2 if bias2 is None else y2 + bias2).backward(grad)
    for wgrad in wgrads:
        wgrad.flush()

    names = {"pre.weight": first.layer_norm_weight, "1.weight": first.weight}
    names["2.weight"] = second.weight
    if kind == "LayerNorm":
        names |= {"pre.bias": first.layer_norm_bias, "1.bias": first.bias, "2.bias": second.bias}
    w = {name: p.detach().clone().requires_grad_() for name, p in names.items()}
    used = {**w, "pre.weight": w["pre.weight"] + 1} if centered else w
    z = x.detach().clone().requires_grad_()
    x1 = reference.norm(z, used, "pre", kind)
    want1 = reference.linear(x1, used, "1")
    want1.retain_grad()
    want2 = reference.linear(torch.nn.functional.gelu(want1), used, "2")
    want2.backward(grad)
    assert (bias2 is not None) == (kind == "LayerNorm")
    if not again:
        whole = y2 if bias2 is None else y2 + bias2
        assert torch.allclose(whole, want2, rtol=1e-9, atol=1e-12)
    assert want1.grad is not None and x.grad is not None and z.grad is not None
    assert torch.allclose(x.grad, z.grad, rtol=1e-9, atol=1e-12)
    for name, parameter in names.items():
        want = w[name].grad
        if name == "1.weight":
            want = reference.low_rank(want1.grad, x1, w[name], 5)
        elif name == "2.weight":
            want = reference.low_rank(grad, torch.nn.functional.gelu(want1), w[name], 5)
        assert want is not None and parameter.grad is not None, name
        assert torch.allclose(parameter.grad, want, rtol=1e-8, atol=1e-10), name


# -- holding ---------------------------------------------------------------------------------------


def trainable(bf16: bool, steps: int = 2) -> tuple[Any, Any]:
    """A block in DDP and Megatron's AdamW for it, after some ordinary steps."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    dtype = torch.bfloat16 if bf16 else torch.float32
    config = mecefo_model.config(params_dtype=dtype, pipeline_dtype=dtype, bf16=bf16)
    ddp = DistributedDataParallel(
        config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), mecefo_model.block(config)
    )
    settings = OptimizerConfig(
        optimizer="adam", lr=1e-2, weight_decay=0.1, bf16=bf16, params_dtype=dtype, clip_grad=1.0
    )
    optimizer = get_megatron_optimizer(settings, [ddp], use_gloo_process_groups=False)
    for seed in range(1, steps + 1):
        fill(ddp, seed)
        optimizer.step()
    return ddp, optimizer


def fill(ddp: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in ddp.module.named_parameters():
        parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
        if seed > 2 and is_held(name):
            parameter.main_grad.zero_()  # nobody contributed


def is_held(name: str) -> bool:
    return "self_attention" in name or "input_layernorm" in name


def state_of(ddp: Any, optimizer: Any) -> dict[str, list[torch.Tensor]]:
    """Of each parameter: its value, its fp32 copy, and what Adam keeps."""
    found = {}
    for name, parameter in ddp.module.named_parameters():
        main = getattr(parameter, "main_param", parameter)
        inner = [one.optimizer.state for one in optimizer.chained_optimizers]
        state = next(s[main] for s in inner if main in s)
        tensors = [parameter.data, main.data, *(state[key] for key in sorted(state))]
        found[name] = [tensor.clone() for tensor in tensors]
    return found


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("bf16", [False, True])
def test_held_parameters_stay_to_the_bit(bf16: bool) -> None:
    from megatron_ft.mecefo.hold import hold

    steps: dict[bool, Any] = {}
    for held in (True, False):
        ddp, optimizer = trainable(bf16)
        before = state_of(ddp, optimizer)
        groups = [[list(g["params"]) for g in o.param_groups] for o in optimizer.chained_optimizers]
        fill(ddp, 3)
        if held:
            wanted = [p for name, p in ddp.module.named_parameters() if is_held(name)]
            with hold(optimizer, wanted):
                done, norm, _ = optimizer.step()
        else:
            done, norm, _ = optimizer.step()
        assert done
        again = [[list(g["params"]) for g in o.param_groups] for o in optimizer.chained_optimizers]
        assert [[list(map(id, g)) for g in o] for o in again] == [
            [list(map(id, g)) for g in o] for o in groups
        ]
        steps[held] = before, state_of(ddp, optimizer), norm
    before, after, norm = steps[True]
    _, without, other_norm = steps[False]
    assert norm == other_norm  # gradients that are zero
    for name in before:
        if is_held(name):
            assert same(before[name], after[name]), name
            # the control: without holding, weight decay and momentum move them
            assert not same(before[name], without[name]), name
        else:
            assert not same(before[name], after[name]), name
            assert same(after[name], without[name]), name


def test_holding_ends_with_an_exception_too() -> None:
    from megatron_ft.mecefo.hold import hold

    ddp, optimizer = trainable(bf16=False)
    parameters = list(ddp.module.parameters())
    inner = [one.optimizer for one in optimizer.chained_optimizers]
    with pytest.raises(RuntimeError, match="died"), hold(optimizer, parameters):
        assert not any(group["params"] for one in inner for group in one.param_groups)
        raise RuntimeError("died")
    assert sum(len(group["params"]) for one in inner for group in one.param_groups) == len(
        parameters
    )


def test_the_distributed_optimizer_is_refused() -> None:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from megatron_ft.mecefo.hold import hold

    config = mecefo_model.config(params_dtype=torch.float32, pipeline_dtype=torch.float32)
    settings = {"use_distributed_optimizer": True}
    ddp = DistributedDataParallel(
        config, DistributedDataParallelConfig(**settings), mecefo_model.block(config)
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-2, **settings), [ddp], use_gloo_process_groups=False
    )
    with pytest.raises(ValueError, match="--use-distributed-optimizer"), hold(optimizer, []):
        pass
