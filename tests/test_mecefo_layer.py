"""Megatron's layer in MeCeFO mode against a layer in plain torch, in double precision."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from harness import ROOT, run_alone
from mecefo_layers import (
    BF16,
    BOUND,
    DROPOUT,
    EVERYTHING,
    EXACT,
    FFN,
    HIDDEN,
    MODELS,
    RANK,
    Model,
    assert_same,
    close,
    degraded,
    wrapped,
)
from mecefo_layers import groups as groups

from megatron_ft.mecefo.options import MecefoOptions

# -- against the formulas --------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recompute", [True, False])
def test_the_whole_method_is_its_formulas(name: str, recompute: bool) -> None:
    model = Model(**MODELS[name])
    stock, _ = model.run()
    stock_gradients = model.gradients()
    handle = degraded(model.block, MecefoOptions(rank=RANK, recompute_ffn=recompute))
    output, input_grad = model.run()
    handle.flush()
    got = model.gradients()
    handle.close()

    assert torch.equal(output, stock)
    want = model.reference(RANK)
    assert close(output, want["output"])
    assert close(input_grad, want["input"])
    assert_same(got, want["weights"], BOUND)
    skipped = stock_gradients.keys() - got.keys()
    assert skipped == {n for n in stock_gradients if "self_att" in n or "input_layernorm" in n}
    # the bound can tell the low-rank gradient from the exact one
    fc1 = "layers.0.mlp.linear_fc1.weight"
    assert not close(got[fc1], model.reference(None)["weights"][fc1], 1e-2)


@pytest.mark.parametrize(
    "options",
    [
        MecefoOptions(rank=RANK, recompute_ffn=False, low_rank=False),
        MecefoOptions(rank=RANK, skip_attention=False, low_rank=False),
        MecefoOptions(rank=RANK, skip_attention=False, recompute_ffn=False),
        MecefoOptions(rank=RANK, low_rank=False),
    ],
    ids=["skip", "recompute", "low-rank", "skip-recompute"],
)
@pytest.mark.parametrize("name", ["llama", "gpt-biases"])
def test_each_technique_alone(name: str, options: MecefoOptions) -> None:
    model = Model(**MODELS[name])
    handle = degraded(model.block, options)
    output, input_grad = model.run()
    handle.flush()
    got = model.gradients()
    handle.close()
    rank = RANK if options.low_rank else None
    want = model.reference(rank, skip_attention=options.skip_attention)
    assert close(output, want["output"]) and close(input_grad, want["input"])
    assert_same(got, want["weights"], BOUND)


def test_exact_attention_in_some_layers() -> None:
    model = Model()
    handle = degraded(model.block, EVERYTHING, exact_attention=[1], keep_ffn=[1])
    assert (handle.indices, handle.skipped_attention) == ((0, 1), (0,))
    _, input_grad = model.run()
    handle.flush()
    got = model.gradients()
    handle.close()
    assert "layers.1.self_attention.linear_qkv.weight" in got
    assert "layers.0.self_attention.linear_qkv.weight" not in got
    assert not close(input_grad, model.reference(RANK)["input"], 1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_full_rank_is_exact(name: str) -> None:
    model = Model(**MODELS[name], **DROPOUT)
    output, input_grad = model.run()
    want = model.gradients()
    handle = degraded(model.block, EXACT)
    again, again_grad = model.run()
    handle.flush()
    got = model.gradients()
    handle.close()
    assert torch.equal(output, again)
    assert close(again_grad, input_grad)
    assert_same(got, want, BOUND)


# -- dropout, precision, accumulation --------------------------------------------------------------


def test_dropout_is_replayed() -> None:
    model = Model(**DROPOUT)
    found = []
    for options, seed in (
        (MecefoOptions(rank=RANK, recompute_ffn=False), 5),
        (MecefoOptions(rank=RANK), 5),
        (MecefoOptions(rank=RANK), 6),
    ):
        handle = degraded(model.block, options)
        output, input_grad = model.run(seed=seed)
        after = torch.get_rng_state()
        handle.flush()
        handle.close()
        found.append((output, after, input_grad, model.gradients()))
    kept, replayed, other = found
    assert torch.equal(kept[0], replayed[0]) and torch.equal(kept[1], replayed[1])
    assert close(replayed[2], kept[2])
    assert_same(replayed[3], kept[3], BOUND)
    fc2 = "layers.0.mlp.linear_fc2.weight"
    assert not close(other[3][fc2], kept[3][fc2], 1e-2)


def test_bf16_with_fp32_gradients() -> None:
    model = Model(**BF16)
    stock, _ = model.run()
    model.gradients()
    ddp = wrapped(model)
    handle = degraded(model.block, EVERYTHING, ddp=[ddp])
    output, input_grad = model.run()
    handle.flush()
    assert torch.equal(output, stock)
    precise = Model()
    with torch.no_grad():
        for to, source in zip(precise.block.parameters(), model.block.parameters(), strict=True):
            to.copy_(source)
    precise.x, precise.grad = model.x.double(), model.grad.double()
    want = precise.reference(RANK)
    assert close(input_grad, want["input"], 3e-2)
    for name, parameter in model.block.named_parameters():
        assert parameter.main_grad.dtype is torch.float32 and parameter.grad is None
        if name in want["weights"]:
            assert close(parameter.main_grad, want["weights"][name], 5e-2), name
        else:
            assert not parameter.main_grad.any()
    handle.close()


def test_factors_add_up_and_are_flushed_once() -> None:
    model = Model()
    others = [torch.randn_like(model.x) for _ in range(3)]
    want: dict[str, torch.Tensor] = {}
    for x in others:
        model.x = x
        for name, gradient in model.reference(RANK)["weights"].items():
            want[name] = want.get(name, torch.zeros_like(gradient)) + gradient
    handle = degraded(model.block, EVERYTHING)
    model.run()  # discarded: only its norm gradients, which autograd adds, would stay
    handle.discard()
    model.gradients()
    for x in others:
        model.run(x=x)
    fc1 = model.block.layers[0].mlp.linear_fc1.weight
    assert fc1.grad is None
    with pytest.raises(AssertionError, match="would be lost"):
        handle.off()
    handle.flush()
    handle.flush()
    assert_same(model.gradients(), want, BOUND)
    assert handle.memory().factor_bytes == 8 * RANK * 2 * (2 * FFN + HIDDEN)
    assert handle.memory().basis_bytes == 8 * RANK * 2 * (HIDDEN + FFN)
    handle.close()
    assert handle.memory().factor_bytes == 0


def test_off_is_stock_to_the_bit() -> None:
    model = Model(**DROPOUT)
    before = (*model.run(), model.gradients())
    handle = degraded(model.block, EVERYTHING)
    model.run()
    handle.flush()
    model.gradients()
    handle.close()
    after = (*model.run(), model.gradients())
    assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])
    assert all(torch.equal(before[2][name], after[2][name]) for name in before[2])
    assert not any("ft_degraded" in vars(m) for m in model.block.modules())


def test_evaluation_is_stock() -> None:
    model = Model(**DROPOUT)
    model.block.eval()
    call = {"attention_mask": None, "rotary_pos_emb": model.angles}
    with torch.no_grad():
        before = model.block(hidden_states=model.x.clone(), **call)
        handle = degraded(model.block, EVERYTHING)
        after = model.block(hidden_states=model.x.clone(), **call)
    handle.close()
    assert torch.equal(before, after)


def test_singular_vectors_follow_the_weights() -> None:
    """Each layer in its turn, from the step of its snapshot to the next step."""
    from megatron_ft.mecefo.basis import right_singular_vectors

    model = Model()
    handle = degraded(model.block, MecefoOptions(rank=RANK, svd_interval=4), step=10)
    fc1 = [layer.mlp.linear_fc1.weight for layer in model.block.layers]
    want = [right_singular_vectors(weight, RANK) for weight in fc1]
    snapshots: dict[tuple[int, int], torch.Tensor] = {}
    for step in range(10, 20):
        for index, weight in enumerate(fc1):
            snapshots[step, index] = weight.detach().clone()
        handle.begin_step(step)
        for index, weight in enumerate(fc1):
            # layer 0 takes its snapshots in steps 14 and 18, layer 1 in 12 and 16
            since = step - 1 - 10 - 2 * index
            if step - 1 > 10 and since >= 0 and since % 4 == 0:
                want[index] = right_singular_vectors(snapshots[step - 1, index], RANK)
            assert torch.equal(weight.ft_low_rank.basis, want[index]), (step, index)
        with torch.no_grad():
            for weight in fc1:
                weight.add_(torch.randn_like(weight))
    handle.close()
    assert not hasattr(fc1[0], "ft_low_rank")


# -- tensor and sequence parallelism ---------------------------------------------------------------


def test_two_tensor_parallel_ranks(tmp_path: Path) -> None:
    """Shards against the dense reference: each rank compares its part and writes what it saw."""
    run = run_alone(
        [
            *(
                sys.executable,
                "-W",
                "ignore",
                "-m",
                "torch.distributed.run",
                "--nproc-per-node",
                "2",
            ),
            *("--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),
            *(str(ROOT / "tests" / "workers" / "mecefo_tp_worker.py"), str(tmp_path)),
        ],
        tmp_path,
        timeout=180,
    )
    assert run.returncode == 0, run.output[-4000:]
    for rank in range(2):
        seen = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert len(seen) == 8
        for case, errors in seen.items():
            control = errors.pop("control")
            assert max(errors.values()) <= BOUND, (rank, case, errors)
            assert control > 1e-2, (rank, case, "the other rank's singular vectors would pass too")
