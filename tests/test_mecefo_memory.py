"""What a layer in MeCeFO mode keeps for its backward pass."""

from __future__ import annotations

import pytest
import torch
from mecefo_layers import BATCH, EVERYTHING, FFN, HIDDEN, MODELS, SEQUENCE, Model, degraded
from mecefo_layers import groups as groups


def kept_bytes(model: Model) -> int:
    """Of all tensors that a forward pass keeps for its backward, parameters left out."""
    parameters = {p.untyped_storage().data_ptr() for p in model.block.parameters()}
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.block(
            hidden_states=model.x.clone().requires_grad_(),
            attention_mask=None,
            rotary_pos_emb=model.angles,
        )
    return sum(seen.values())


def test_a_degraded_layer_keeps_its_ffn_input_only() -> None:
    model = Model()
    stock = kept_bytes(model)
    handle = degraded(model.block, EVERYTHING)
    assert kept_bytes(model) == 2 * SEQUENCE * BATCH * HIDDEN * 8
    handle.on([0, 1], keep_ffn=[0, 1])
    some = kept_bytes(model)
    handle.close()
    assert 2 * SEQUENCE * BATCH * HIDDEN * 8 < some < stock


@pytest.mark.parametrize("name", ["llama", "gpt-biases"])
def test_the_count_of_kept_activations_is_near(name: str) -> None:
    from megatron_ft.mecefo.budget import LayerShape, layer_activations

    model = Model(**MODELS[name])
    shape = LayerShape(
        hidden=HIDDEN,
        ffn=FFN,
        gated=model.config.gated_linear_unit,
        num_heads=4,
        num_query_groups=2,
        head_width=HIDDEN // 4,
        sequence=SEQUENCE,
    )
    count = layer_activations(shape, EVERYTHING)
    per_token = 2 * SEQUENCE * BATCH * 8
    measured = kept_bytes(model) / per_token
    handle = degraded(model.block, EVERYTHING, keep_ffn=[0, 1])
    kept = kept_bytes(model) / per_token
    handle.close()
    assert measured == pytest.approx(count.normal, rel=0.25)
    assert kept == pytest.approx(count.ffn_kept, rel=0.25)
