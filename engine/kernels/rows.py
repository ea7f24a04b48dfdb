"""What happens to one row: quantisation, norm, exponential.

Every function treats its row by itself, in an order that depends on nothing but the row's own length: its bits are the
same whether it is computed alone, as plain decoding does, or among the rows of a verify pass.
"""

from __future__ import annotations

import numpy as np

from engine.kernels.compile import exact, inline
from engine.kernels.lanes import float_from_bits

F = np.float32
LARGEST = F(4095)  # of a quantised activation: 13 bits with its sign
PARTS = 16  # partial sums of a row, side by side


@exact
def quantise(x, q):
    """A row to int16 `q`, zeros behind it; returns its scale."""
    largest = F(0)
    for i in range(x.shape[0]):
        largest = max(largest, abs(x[i]))
    if largest == F(0):
        largest = F(1)
    factor = LARGEST / largest
    for i in range(x.shape[0]):
        q[i] = np.int16(np.rint(x[i] * factor))
    q[x.shape[0] :] = 0
    return largest / LARGEST


@exact
def normalise(x, weight, eps, out):
    """RMS norm of a row (Zhang and Sennrich 2019)."""
    for i in range(x.shape[0]):
        out[i] = x[i] * x[i]
    factor = F(1) / np.sqrt(total(out) / F(x.shape[0]) + eps)
    for i in range(x.shape[0]):
        out[i] = x[i] * factor * weight[i]


@exact
def total(x):
    """The sum of a row, in the order that is written here: compilers may otherwise choose one for each place of use."""
    parts = np.zeros(PARTS, F)
    whole = x.shape[0] - x.shape[0] % PARTS
    for i in range(0, whole, PARTS):
        for part in range(PARTS):
            parts[part] += x[i + part]
    for i in range(whole, x.shape[0]):
        parts[i - whole] += x[i]
    total = F(0)
    for part in range(PARTS):
        total += parts[part]
    return total


@inline
def exp(x):
    """e^x to about 2 units in the last place (Cephes' expf), as arithmetic that vectorises."""
    x = max(F(-87.0), min(F(88.0), x))
    n = np.rint(x * F(1.4426950408889634))
    r = (x - n * F(0.693359375)) - n * F(-2.12194440e-4)
    p = F(1.9875691500e-4)
    p = p * r + F(1.3981999507e-3)
    p = p * r + F(8.3334519073e-3)
    p = p * r + F(4.1665795894e-2)
    p = p * r + F(1.6666665459e-1)
    p = p * r + F(5.0000001201e-1)
    power = float_from_bits((np.int32(n) + np.int32(127)) << np.int32(23))
    return (p * r * r + r + F(1)) * power
