"""Packed weights give the layer's own product; rows are padded and cut into tiles that lose and add nothing."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from llm.products import agreement, pack_weights, padded, tile_products

_SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 50}


@pytest.fixture(params=["llama", "gpt2", "phi"])  # without biases, Conv1D, with biases
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(request.param, **_SMALL))  # type: ignore[no-untyped-call]
    assert isinstance(made, PreTrainedModel)
    return made.eval()  # type: ignore[no-untyped-call, no-any-return]


@torch.no_grad()
def outputs(model: PreTrainedModel, count: int) -> dict[str, torch.Tensor]:
    """Of the first rows of 64 that are the same in every call."""
    found = {}
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear | Conv1D):
            inputs: int = layer.nx if isinstance(layer, Conv1D) else layer.in_features
            rows = torch.randn(1, 64, inputs, generator=torch.Generator().manual_seed(1))
            found[name] = layer(rows[:, :count])
    return found


def test_packed_weights_give_the_layers_own_product(model: PreTrainedModel) -> None:
    expected = outputs(model, 20)
    pack_weights(model)
    for name, found in outputs(model, 20).items():
        torch.testing.assert_close(found, expected[name], rtol=1e-5, atol=1e-6)


def test_cut_into_tiles_a_row_has_the_bits_that_it_has_alone(model: PreTrainedModel) -> None:
    pack_weights(model)
    tiles, _ = agreement(model, (2, 1))
    assert tiles
    assert 16 in tiles
    tile_products(model, tiles)
    whole = outputs(model, padded(50, tiles))
    for count in (1, 3, 16, 17, 33):
        for name, found in outputs(model, padded(count, tiles)).items():
            assert torch.equal(found[:, :count], whole[name][:, :count]), f"{name}, {count} rows"


@pytest.mark.parametrize(
    ("tiles", "sizes"),
    [
        ((), {0: 0, 1: 1, 5: 5, 17: 17}),
        ((16, 64), {0: 0, 1: 16, 16: 16, 17: 32, 64: 64, 65: 80}),
        ((2, 4, 8, 16, 32), {0: 0, 1: 2, 2: 2, 3: 4, 5: 8, 9: 16, 16: 16, 17: 32, 33: 48}),
    ],
)
def test_few_rows_are_one_tile_and_more_are_cut(tiles: tuple[int, ...], sizes: dict[int, int]) -> None:
    assert {count: padded(count, tiles) for count in sizes} == sizes
