"""Linear layers whose weights lie in the order that oneDNN's matrix kernels want.

In half precision torch uses these kernels anyway, and they bring the weight into their own order at every
call. For a few rows that takes as long as the product: with packed weights, a decode step's products take 0.5
to 0.7 of the time, and the bits of the results stay the same. In float32 torch would use MKL; packed oneDNN
kernels are as fast for one row and faster for several. They sum in another order, so exact mode, which counts
on MKL's promises, doesn't pack.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

_log = logging.getLogger(__name__)

_TYPICAL_ROWS = 8
"""Rows that the order is chosen for; measured from 1 to 512 it made no difference."""


_OPERATORS = ("_reorder_linear_weight", "_linear_pointwise")
_SUPPORT_CHECKS = {
    torch.float32: None,
    torch.bfloat16: "_is_mkldnn_bf16_supported",
    torch.float16: "_is_mkldnn_fp16_supported",
}


class PackedLinear(nn.Module):
    """Stands in for an `nn.Linear` at inference, and holds its weight packed, only."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _TYPICAL_ROWS)

    @property
    def weight(self) -> torch.Tensor:
        """A plain copy, for model code that looks at a layer's weight."""
        plain: torch.Tensor = self._packed.to_dense()
        return plain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return result


def pack_linear_layers(model: Any) -> int:
    """Replace the model's linear layers if it lies on the CPU and this torch and this processor have the
    kernels for its dtype. Returns how many were replaced."""
    if model.device.type != "cpu" or not _kernels_for(model.dtype):
        return 0
    # Only the class itself: a subclass may compute something else.
    names = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    for name in names:
        model.set_submodule(name, PackedLinear(model.get_submodule(name)))
    _log.info("packed the weights of %d linear layers", len(names))
    return len(names)


def _kernels_for(dtype: torch.dtype) -> bool:
    operators = torch.ops.mkldnn
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not has_onednn or dtype not in _SUPPORT_CHECKS or not all(hasattr(operators, op) for op in _OPERATORS):
        return False
    check = _SUPPORT_CHECKS[dtype]
    return check is None or bool(getattr(operators, check)())
