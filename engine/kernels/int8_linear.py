"""int8 linear layers for any architecture, put in place of the plain ones."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from engine.kernels.int8 import pack
from engine.kernels.linear import linear_rows, stacked


class Int8Linear(nn.Module):
    """`nn.Linear` with int8 weights for each output channel and activations of 13 bits for each row.

    `[..., in] -> [..., out]`, float32. A row's result is the same bits whatever the number of rows.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed = stacked([pack(linear.weight.detach().float().numpy())], 1)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        rows = np.ascontiguousarray(x.detach().reshape(-1, self.in_features).numpy(), dtype=np.float32)
        out = np.empty((len(rows), self.out_features), np.float32)
        linear_rows(rows, self.packed, out)
        result = torch.from_numpy(out).view(*x.shape[:-1], self.out_features)
        return result if self.bias is None else result + self.bias


def quantise_linears(model: nn.Module) -> int:
    """Replace every `nn.Linear` of `model` in place, the LM head too; returns how many were replaced.

    Each plain weight is given up before the next is read. A weight tied to the embedding keeps its plain copy there.
    """
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, Int8Linear(child))
                replaced += 1
    return replaced
