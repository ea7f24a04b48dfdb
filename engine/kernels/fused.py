"""What a Llama-like layer does, in a handful of compiled loops over int8 weights (`products.py`, `rows.py`)."""

from __future__ import annotations

import numpy as np
from numba import prange

from engine.kernels.compile import parallel, plain
from engine.kernels.products import multiply, multiply_swiglu
from engine.kernels.rows import F, attend, normalise, quantise


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


@plain
def quantise_rows(x, q, scale, rows):
    """Each row of `x` to int16 `q` and its scale. One loop for any number of rows: a second, threaded one would be
    compiled apart from it, and might round differently."""
    for m in range(rows):
        scale[m] = quantise(x[m], q[m])


@plain
def normalise_rows(x, weight, eps, q, scale, rows):
    """The same behind an RMS norm."""
    normal = np.empty(x.shape[1], F)
    for m in range(rows):
        normalise(x[m], weight, eps, normal)
        scale[m] = quantise(normal, q[m])


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
