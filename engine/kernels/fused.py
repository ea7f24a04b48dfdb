"""What a Llama-like layer does, in a handful of compiled loops (`linear.py`, `attention.py`, `rows.py`)."""

from __future__ import annotations

import numpy as np

from engine.kernels.attention import attend_rows
from engine.kernels.compile import plain
from engine.kernels.linear import linear, swiglu
from engine.kernels.rows import F, normalise


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


@plain
def normalise_rows(x, weight, eps, out):
    """The RMS norm of each row."""
    for m in range(x.shape[0]):
        normalise(x[m], weight, eps, out[m])


@plain
def decode_layers(x, weights, norms, bias, eps, cosine, sine, keys, values, start, heads, inner):
    """All layers on `rows` embedded tokens: `x` float32 `[rows, hidden]` in place, KV appended at `start`.

    `weights`: (qkv, output, gate, up, down), each stacked over the layers; `norms`: (before attention, before the
    feed-forward) `[layers, hidden]`; `bias`: `[layers, qkv channels]`; `keys`, `values`: `[layers, kv_heads, capacity,
    dim]`; `inner`: the feed-forward's channels.
    """
    qkv_w, output_w, gate_w, up_w, down_w = weights
    rows = x.shape[0]
    dim = keys.shape[3]
    hidden = np.empty_like(x)
    qkv = np.empty((rows, bias.shape[1]), F)
    mixed = np.empty((rows, heads * dim), F)
    fed = np.empty((rows, inner), F)
    for layer in range(bias.shape[0]):
        normalise_rows(x, norms[0][layer], eps, hidden)
        linear(hidden, qkv_w, layer, qkv, False)
        rotate_and_append(qkv, bias[layer], cosine, sine, keys[layer], values[layer], start, heads, rows)
        attend_rows(qkv, keys[layer], values[layer], start, heads, mixed)
        linear(mixed, output_w, layer, x, True)
        normalise_rows(x, norms[1][layer], eps, hidden)
        swiglu(hidden, gate_w, up_w, layer, fed)
        linear(fed, down_w, layer, x, True)


@plain
def project(x, norm, eps, head, logits):
    """The final norm and the LM head of every row of `x`: float32 `[rows, vocab]` into `logits`."""
    hidden = np.empty_like(x)
    normalise_rows(x, norm, eps, hidden)
    linear(hidden, head, 0, logits, False)
