"""Linear layers with weights prepacked for oneDNN.

`F.linear` in fp32 hands 2 to 9 rows to a GEMM that re-reads the weights badly: a verify pass then costs almost
twice a plain step, and speculation cannot pay. With the weight reordered once, a few rows cost little more than one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# The row count that oneDNN picks the weight's layout for; any number of rows runs on it.
ROWS_HINT = 4


class PackedLinear(nn.Module):
    """`nn.Linear` over a reordered fp32 weight: `[..., in] -> [..., out]`, the same up to rounding."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS_HINT)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return out


def can_pack() -> bool:
    """Whether this torch build carries oneDNN's packed linear."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")  # type: ignore[no-untyped-call]


def pack_linears(model: nn.Module) -> int:
    """Replace every fp32 `nn.Linear` of `model` in place, the LM head too; returns how many were replaced.

    A weight that is tied to the embedding keeps its plain copy there.
    """
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.weight.dtype == torch.float32:
                setattr(parent, name, PackedLinear(child))
                replaced += 1
    return replaced
