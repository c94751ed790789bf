"""Linear layers whose weights lie in the order that the CPU's matrix kernels want.

In half precision oneDNN brings a weight into its own order at every call, unless it lies in it already. For a
few rows that takes as long as the product: decode steps are 1.4 to 1.9 times as fast with packed weights. The
kernels, and with them the bits of the results, stay the same.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

_log = logging.getLogger(__name__)

_TYPICAL_ROWS = 8
"""Rows that the order is chosen for; measured from 1 to 512 it made no difference."""


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
    """Replace the model's linear layers where packing helps: on CPU, in half precision, if this torch and
    this processor have the kernels. Returns how many were replaced."""
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
    checks = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    needed = (checks.get(dtype, ""), "_reorder_linear_weight", "_linear_pointwise")
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not has_onednn or not all(hasattr(operators, name) for name in needed):
        return False
    return bool(getattr(operators, needed[0])())
