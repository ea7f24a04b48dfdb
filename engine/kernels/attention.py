"""Causal attention of the query heads that share a key and value head, for one row at a time.

The order of a row's operations depends on nothing but its length.
"""

from __future__ import annotations

import numpy as np
from numba import prange, types
from numba.extending import intrinsic

from engine.kernels.compile import exact, parallel, plain
from engine.kernels.fma import LANES, dot_panel
from engine.kernels.lanes import F32, I64, add_product, host_features, place, pointer, totals, vector
from engine.kernels.rows import F, exp, total

POSITIONS = 16 if "avx512f" in host_features() else 8  # keys at a time: the lanes of a register, and as many registers
HEADS = 4  # query heads at a time at most


@intrinsic
def dot_keys(context, query, keys, stride, size, out):
    """`out[p] = sum_d query[d] * keys[p * stride + d]` for POSITIONS keys; `size` is a multiple of POSITIONS, not 0."""
    floats = types.CPointer(types.float32)
    signature = types.void(floats, floats, types.int64, types.int64, floats)

    def generate(context, builder, signature, args):
        query, keys, stride, size, out = args
        kind = vector(F32, POSITIONS)
        starts = [builder.gep(keys, [builder.mul(stride, I64(p))]) for p in range(POSITIONS)]
        entry, loop, done = builder.block, builder.append_basic_block("dims"), builder.append_basic_block("scores")
        builder.branch(loop)
        builder.position_at_end(loop)
        at = builder.phi(I64)
        sums = [builder.phi(kind) for _ in starts]
        part = builder.load(place(builder, query, at, kind), align=4)
        parts = [builder.load(place(builder, start, at, kind), align=4) for start in starts]
        grown = [add_product(builder, part, key, sum_) for key, sum_ in zip(parts, sums, strict=True)]
        following = builder.add(at, I64(POSITIONS))
        at.add_incoming(I64(0), entry)
        at.add_incoming(following, loop)
        for before, after in zip(sums, grown, strict=True):
            before.add_incoming(kind(None), entry)
            before.add_incoming(after, loop)
        builder.cbranch(builder.icmp_signed("<", following, size), loop, done)
        builder.position_at_end(done)
        builder.store(totals(builder, grown, builder.fadd), place(builder, out, I64(0), kind), align=4)
        return context.get_dummy_value()

    return signature, generate


@plain
def score(queries, keys, length, heads, scores):
    """`scores[h, p] = queries[h] . keys[p]` for `length` positions; `keys` holds POSITIONS at least.

    The last block is moved back where it would reach beyond `keys`. It may reach beyond `length`: what it writes there
    is not read.
    """
    capacity, dim = keys.shape
    whole = dim - dim % POSITIONS
    for block in range(0, length, POSITIONS):
        first = min(block, capacity - POSITIONS)
        for h in range(heads):
            if whole:
                query, at = pointer(queries, h * dim), pointer(scores, h * scores.shape[1] + first)
                dot_keys(query, pointer(keys, first * dim), dim, whole, at)
            else:
                scores[h, first : first + POSITIONS] = F(0)
            for d in range(whole, dim):
                for p in range(first, first + POSITIONS):
                    scores[h, p] += queries[h * dim + d] * keys[p, d]


@exact
def weigh(scores, scale):
    """Scores to `e^(scale * (score - largest))` in place; returns their sum."""
    top = F(-3e38)
    for p in range(scores.shape[0]):
        top = max(top, scores[p])
    for p in range(scores.shape[0]):
        scores[p] = exp((scores[p] - top) * scale)
    return total(scores)


@plain
def mix(weights, values, length, heads, mixed):
    """`mixed[h] = sum_p weights[h, p] * values[p]` over `length` positions, p from first to last."""
    stride, dim = weights.shape[1], values.shape[1]
    whole = dim - dim % LANES
    part = np.empty((HEADS, LANES), F)
    for first in range(0, whole, LANES):
        dot_panel(heads, pointer(weights, 0), stride, pointer(values, first), dim, length, pointer(part, 0))
        for h in range(heads):
            mixed[h, first : first + LANES] = part[h]
    mixed[:heads, whole:] = F(0)
    for h in range(heads):
        for p in range(length):
            for d in range(whole, dim):
                mixed[h, d] += weights[h, p] * values[p, d]


@parallel
def attend_rows(qkv, keys, values, start, heads, out):
    """Causal attention of every head of every row; row m sees `start + m + 1` positions."""
    kv_heads, _, dim = keys.shape
    shared = heads // kv_heads  # query heads of a key and value head
    parts = (shared + HEADS - 1) // HEADS
    scale = F(1) / np.sqrt(F(dim))
    for task in prange(qkv.shape[0] * kv_heads * parts):
        m, kv, part = task // (kv_heads * parts), task // parts % kv_heads, task % parts
        head, count = kv * shared + part * HEADS, min(HEADS, shared - part * HEADS)
        length = start + m + 1
        weights = np.empty((HEADS, length + POSITIONS), F)
        mixed = np.empty((HEADS, dim), F)
        sums = np.empty(HEADS, F)
        score(qkv[m, head * dim :], keys[kv], length, count, weights)
        for h in range(count):
            sums[h] = weigh(weights[h, :length], scale)
        mix(weights, values[kv], length, count, mixed)
        for h in range(count):
            for d in range(dim):
                out[m, (head + h) * dim + d] = mixed[h, d] / sums[h]
