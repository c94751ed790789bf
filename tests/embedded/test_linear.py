"""Packed linear layers compute what plain ones do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kvhandoff.embedded.linear import PackedLinear, _kernels_for, pack_linear_layers
from tests.embedded.runners import runner_of

pytestmark = pytest.mark.skipif(
    not _kernels_for(torch.bfloat16), reason="this processor has no bfloat16 kernels"
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 3, 8, 130])
def test_a_packed_layer_gives_the_plain_results(rows: int, bias: bool, dtype: torch.dtype):
    torch.manual_seed(rows)
    linear = nn.Linear(96, 200, bias=bias, dtype=dtype)
    packed = PackedLinear(linear)
    assert torch.equal(packed.weight, linear.weight)
    x = torch.randn(1, rows, 96, dtype=dtype)
    with torch.inference_mode():
        torch.testing.assert_close(packed(x), linear(x))


class Custom(nn.Linear):
    """A subclass, which may compute something of its own."""


def test_only_plain_linear_layers_are_packed():
    class Model(nn.Module):
        device, dtype = torch.device("cpu"), torch.bfloat16

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), Custom(8, 8)).bfloat16()
            self.norm = nn.LayerNorm(8)

    model = Model()
    assert pack_linear_layers(model) == 1
    assert isinstance(model.inner[0], PackedLinear)
    assert type(model.inner[2]) is Custom
    model.dtype = torch.float64
    assert pack_linear_layers(model) == 0  # no kernels


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_runner_is_packed_and_an_exact_one_is_not(dtype: str):
    packed = list(runner_of("llama", dtype=dtype)._model.modules())
    assert sum(isinstance(module, PackedLinear) for module in packed) == 3 * 7 + 1
    plain = list(runner_of("llama", dtype=dtype, exact=True)._model.modules())
    assert not any(isinstance(module, PackedLinear) for module in plain)
