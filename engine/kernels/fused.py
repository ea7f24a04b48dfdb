"""What a Llama-like layer does, in a handful of compiled loops over int8 weights.

Every function treats each row by itself, in an order that depends on nothing but the row's own length: a row's bits
are the same whether it is computed alone, as plain decoding does, or among the rows of a verify pass.

Activations are quantised for each row to 13 bits in int16: `x = q * scale`, |q| <= 4,095. Weights are int8 for each
output channel. Their products are summed exactly (`madd.py`).
"""

from __future__ import annotations

import numpy as np
from numba import prange

from engine.kernels.compile import compiled
from engine.kernels.madd import (
    CHANNELS,
    MAX_ROWS,
    MAX_TERMS,
    OUT_STRIDE,
    dot_channel,
    dot_channels,
    float_from_bits,
    pointer,
)

F = np.float32
LARGEST = F(4095)  # of a quantised activation
EXACT = {"nsz", "nnan", "ninf"}  # a maximum may be taken in any order, nothing else changes
FAST = {"contract", "reassoc", "nsz", "arcp", "nnan", "ninf"}  # vector reductions; fixed for a given length
MANY = 16  # rows from which it pays to start threads for what happens between the products
BLOCK = OUT_STRIDE  # output channels that a thread takes at a time


plain = compiled()
parallel = compiled(parallel=True)
fast = compiled(fastmath=FAST)
exact = compiled(fastmath=EXACT)
inline = compiled(inline="always")


# -- one row ------------------------------------------------------------------------------------------------------


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


@fast
def normalise(x, weight, eps, out):
    """RMS norm of a row (Zhang and Sennrich 2019)."""
    squares = F(0)
    for i in range(x.shape[0]):
        squares += x[i] * x[i]
    factor = F(1) / np.sqrt(squares / F(x.shape[0]) + eps)
    for i in range(x.shape[0]):
        out[i] = x[i] * factor * weight[i]


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


@fast
def attend(query, keys, values, length, scores, out):
    """Attention of one head of one row `[dim]` over `length` positions of `[capacity, dim]`."""
    dim = query.shape[0]
    scale = F(1) / np.sqrt(F(dim))
    top = F(-3e38)
    for p in range(length):
        score = F(0)
        for d in range(dim):
            score += query[d] * keys[p, d]
        scores[p] = score * scale
        top = max(top, scores[p])
    total = F(0)
    for p in range(length):
        scores[p] = exp(scores[p] - top)
        total += scores[p]
    out[:] = F(0)
    for p in range(length):
        for d in range(dim):
            out[d] += scores[p] * values[p, d]
    for d in range(dim):
        out[d] /= total


# -- many output channels -----------------------------------------------------------------------------------------


@plain
def dots(x, w, first, count, row, rows, sums):
    """`sums[r, n] = x[row + r] . w[first + n]` as float32, from exact sums; `x` int16 and `w` int8 `[_, padded]`.

    Rows beyond MAX_TERMS are added up in float64 from exact chunks, which is exact below 2^53.
    """
    terms = w.shape[1]
    part = np.empty((MAX_ROWS, OUT_STRIDE), np.int32)
    if terms <= MAX_TERMS:
        chunk_dots(x, w, first, count, row, rows, 0, terms, part)
        for r in range(rows):
            for n in range(count):
                sums[r, n] = F(part[r, n])
        return
    total = np.zeros((MAX_ROWS, OUT_STRIDE), np.float64)
    for start in range(0, terms, MAX_TERMS):
        chunk_dots(x, w, first, count, row, rows, start, min(MAX_TERMS, terms - start), part)
        for r in range(rows):
            for n in range(count):
                total[r, n] += part[r, n]
    for r in range(rows):
        for n in range(count):
            sums[r, n] = F(total[r, n])


@plain
def chunk_dots(x, w, first, count, row, rows, start, size, part):
    """Terms `start` to `start + size` of the products, exact in int32: `part[r, n]`."""
    terms = w.shape[1]
    rows_at = pointer(x, row * terms + start)
    n = 0
    while n + CHANNELS <= count:
        dot_channels(rows, rows_at, pointer(w, (first + n) * terms + start), terms, size, pointer(part, n))
        n += CHANNELS
    while n < count:
        dot_channel(rows, rows_at, pointer(w, (first + n) * terms + start), terms, size, pointer(part, n))
        n += 1


@parallel
def multiply(x, scale, w, channel_scale, out, rows, add):
    """`out[m] = (x w^T)[m] * scale[m] * channel_scale`, added to `out` where `add`; float32 `[rows, channels]`."""
    channels = w.shape[0]
    for block in prange((channels + BLOCK - 1) // BLOCK):
        first = block * BLOCK
        count = min(BLOCK, channels - first)
        sums = np.empty((MAX_ROWS, BLOCK), F)
        for row in range(0, rows, MAX_ROWS):
            taken = min(MAX_ROWS, rows - row)
            dots(x, w, first, count, row, taken, sums)
            for r in range(taken):
                for n in range(count):
                    value = sums[r, n] * (scale[row + r] * channel_scale[first + n])
                    out[row + r, first + n] = out[row + r, first + n] + value if add else value


@parallel
def multiply_swiglu(x, scale, w, channel_scale, out, rows):
    """SwiGLU (Shazeer 2020): `silu(gate) * up`, where `w` holds the gate's channels and then the up projection's."""
    channels = w.shape[0] // 2
    for block in prange((channels + BLOCK - 1) // BLOCK):
        first = block * BLOCK
        count = min(BLOCK, channels - first)
        gates = np.empty((MAX_ROWS, BLOCK), F)
        ups = np.empty((MAX_ROWS, BLOCK), F)
        for row in range(0, rows, MAX_ROWS):
            taken = min(MAX_ROWS, rows - row)
            dots(x, w, first, count, row, taken, gates)
            dots(x, w, channels + first, count, row, taken, ups)
            for r in range(taken):
                for n in range(count):
                    gate = gates[r, n] * (scale[row + r] * channel_scale[first + n])
                    up = ups[r, n] * (scale[row + r] * channel_scale[channels + first + n])
                    out[row + r, first + n] = gate / (F(1) + exp(-gate)) * up


# -- between the products -----------------------------------------------------------------------------------------


@plain
def rotate_and_append(qkv, bias, cosine, sine, keys, values, start, heads, rows):
    """Rotary embedding (Su et al. 2021) of queries and keys; keys and values to `[kv_heads, capacity, dim]`."""
    kv_heads, _, dim = keys.shape
    half = dim // 2
    for m in range(rows):
        position = start + m
        qkv[m] += bias
        for h in range(heads + kv_heads):
            at = h * dim
            for d in range(half):
                low, high = qkv[m, at + d], qkv[m, at + half + d]
                qkv[m, at + d] = low * cosine[position, d] - high * sine[position, d]
                qkv[m, at + half + d] = high * cosine[position, half + d] + low * sine[position, half + d]
        for h in range(kv_heads):
            at = (heads + h) * dim
            keys[h, position] = qkv[m, at : at + dim]
            values[h, position] = qkv[m, at + kv_heads * dim : at + (kv_heads + 1) * dim]


@parallel
def attend_rows(qkv, keys, values, start, heads, rows, out):
    """Causal attention of every head of every row; row m sees `start + m + 1` positions."""
    kv_heads, _, dim = keys.shape
    for task in prange(rows * heads):
        m, h = task // heads, task % heads
        length = start + m + 1
        kv = h // (heads // kv_heads)
        scores = np.empty(length, F)
        at = h * dim
        attend(qkv[m, at : at + dim], keys[kv], values[kv], length, scores, out[m, at : at + dim])


@parallel
def quantise_many(x, q, scale, rows):
    for m in prange(rows):
        scale[m] = quantise(x[m], q[m])


@parallel
def normalise_many(x, weight, eps, q, scale, rows):
    for m in prange(rows):
        scale[m] = normalise_and_quantise(x[m], weight, eps, q[m])


@plain
def normalise_and_quantise(x, weight, eps, q):
    normal = np.empty(x.shape[0], F)
    normalise(x, weight, eps, normal)
    return quantise(normal, q)


@plain
def quantise_rows(x, q, scale, rows):
    """Each row of `x` to int16 `q` and its scale; in parallel where there are enough rows to be worth the start."""
    if rows >= MANY:
        quantise_many(x, q, scale, rows)
    else:
        for m in range(rows):
            scale[m] = quantise(x[m], q[m])


@plain
def normalise_rows(x, weight, eps, q, scale, rows):
    """The same behind an RMS norm."""
    if rows >= MANY:
        normalise_many(x, weight, eps, q, scale, rows)
    else:
        for m in range(rows):
            scale[m] = normalise_and_quantise(x[m], weight, eps, q[m])


# -- a model ------------------------------------------------------------------------------------------------------


@plain
def linear_rows(x, weight, channel_scale, out):
    """A linear layer without bias: `x` float32 `[rows, inputs]` into `out` `[rows, channels]`."""
    rows = x.shape[0]
    scale = np.empty(rows, F)
    q = aligned_rows(rows, weight.shape[1])
    quantise_rows(x, q, scale, rows)
    multiply(q, scale, weight, channel_scale, out, rows, False)


@plain
def aligned_rows(rows, width):
    """int16 `[rows, width]` that begins on a cache line."""
    memory = np.empty(rows * width + 32, np.int16)
    start = (64 - np.int64(memory.ctypes.data) % 64) // 2
    return memory[start : start + rows * width].reshape(rows, width)


@plain
def decode_layers(x, weights, scales, norms, bias, eps, cosine, sine, keys, values, start, heads):
    """All layers on `rows` embedded tokens: `x` float32 `[rows, hidden]` in place, KV appended at `start`.

    `weights`: (qkv, output, gate and up, down), int8 `[layers, channels, padded]`; `scales`: theirs,
    `[layers, channels]`; `norms`: (before attention, before the feed-forward) `[layers, hidden]`; `bias`:
    `[layers, qkv channels]`; `keys`, `values`: `[layers, kv_heads, capacity, dim]`.
    """
    qkv_w, output_w, gate_up_w, down_w = weights
    qkv_s, output_s, gate_up_s, down_s = scales
    rows = x.shape[0]
    dim = keys.shape[3]
    scale = np.empty(rows, F)
    hidden = aligned_rows(rows, qkv_w.shape[2])
    attended = aligned_rows(rows, output_w.shape[2])
    inner = aligned_rows(rows, down_w.shape[2])
    qkv = np.empty((rows, qkv_w.shape[1]), F)
    mixed = np.empty((rows, heads * dim), F)
    fed = np.empty((rows, gate_up_w.shape[1] // 2), F)
    for layer in range(qkv_w.shape[0]):
        normalise_rows(x, norms[0][layer], eps, hidden, scale, rows)
        multiply(hidden, scale, qkv_w[layer], qkv_s[layer], qkv, rows, False)
        rotate_and_append(qkv, bias[layer], cosine, sine, keys[layer], values[layer], start, heads, rows)
        attend_rows(qkv, keys[layer], values[layer], start, heads, rows, mixed)
        quantise_rows(mixed, attended, scale, rows)
        multiply(attended, scale, output_w[layer], output_s[layer], x, rows, True)
        normalise_rows(x, norms[1][layer], eps, hidden, scale, rows)
        multiply_swiglu(hidden, scale, gate_up_w[layer], gate_up_s[layer], fed, rows)
        quantise_rows(fed, inner, scale, rows)
        multiply(inner, scale, down_w[layer], down_s[layer], x, rows, True)


@plain
def project(x, norm, eps, weight, channel_scale, logits):
    """The final norm and the LM head of every row of `x`: float32 `[rows, vocab]` into `logits`."""
    rows = x.shape[0]
    scale = np.empty(rows, F)
    hidden = aligned_rows(rows, weight.shape[1])
    normalise_rows(x, norm, eps, hidden, scale, rows)
    multiply(hidden, scale, weight, channel_scale, logits, rows, False)
