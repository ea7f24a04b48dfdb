"""Exact integer dot products of a few int16 rows with an int8 row, as vector code that LLVM lowers well.

The products are written as LLVM IR in the form `sext, mul, add neighbours`, which becomes `vpmaddwd` on AVX2,
`vpdpwssd` where there is VNNI, and whatever else a processor has: numba's own loops vectorise in this way for one row
and not for several. All sums are int32 and exact, so neither vector width nor row count can change a bit of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.kernels.compile import compiled
from engine.kernels.lanes import I32, I64, host_features, place, shuffle, totals, vector

_WIDE = "avx512bw" in host_features()

PADDING = 32  # rows are padded with zeros to a multiple of so many terms
LANES = 32 if _WIDE else 16  # int16 products of one chunk
MAX_ROWS = 5  # activation rows of a tile
CHANNELS = 4 if _WIDE else 2  # weight rows of a tile: its rows x channels of sums must fit in the vector registers
OUT_STRIDE = 16  # int32 sums between two activation rows' results: they lie channel by channel
MAX_TERMS = 4096  # 4,095 * 127 * 4,096 < 2^31: longer rows are summed in chunks


def _emit(builder: ir.IRBuilder, args: tuple[ir.Value, ...], rows: int, channels: int) -> None:
    """A loop over chunks of LANES that keeps a vector of sums for each row and channel; then the sums to `out`."""
    x, w, stride, size, out = args
    half = vector(I32, LANES // 2)
    entry, loop, done = builder.block, builder.append_basic_block("chunks"), builder.append_basic_block("sums")
    builder.branch(loop)
    builder.position_at_end(loop)
    at = builder.phi(I64)
    sums = [[builder.phi(half) for _ in range(channels)] for _ in range(rows)]
    weights = [_load(builder, w, _offset(builder, stride, channel, at), ir.IntType(8)) for channel in range(channels)]
    grown = []
    for row in range(rows):
        activations = _load(builder, x, _offset(builder, stride, row, at), ir.IntType(16))
        products = [_add_neighbours(builder, builder.mul(activations, weight)) for weight in weights]
        grown.append([builder.add(sum_, more) for sum_, more in zip(sums[row], products, strict=True)])
    following = builder.add(at, I64(LANES))
    at.add_incoming(I64(0), entry)
    at.add_incoming(following, loop)
    for row in range(rows):
        for before, after in zip(sums[row], grown[row], strict=True):
            before.add_incoming(ir.Constant(half, None), entry)
            before.add_incoming(after, loop)
    builder.cbranch(builder.icmp_signed("<", following, size), loop, done)
    builder.position_at_end(done)
    for row in range(rows):
        at_row = place(builder, out, I64(row * OUT_STRIDE), vector(I32, channels))
        builder.store(totals(builder, grown[row], builder.add), at_row, align=4)


def _offset(builder: ir.IRBuilder, stride: ir.Value, index: int, at: ir.Value) -> ir.Value:
    return builder.add(builder.mul(stride, I64(index)), at)


def _load(builder: ir.IRBuilder, base: ir.Value, at: ir.Value, kind: ir.Type) -> ir.Value:
    """LANES integers from `base[at:]`, widened to int32."""
    chunk = builder.load(place(builder, base, at, vector(kind, LANES)), align=kind.width // 8)
    return builder.sext(chunk, vector(I32, LANES))


def _add_neighbours(builder: ir.IRBuilder, v: ir.Value) -> ir.Value:
    """Half as many lanes: each is the sum of two neighbours."""
    return builder.add(*(shuffle(builder, v, v, range(first, v.type.count, 2)) for first in (0, 1)))


def _dot_tile(rows: int, channels: int) -> Callable[..., Any]:
    @intrinsic
    def dot(context, x, w, stride, size, out):
        x, w, out = types.CPointer(types.int16), types.CPointer(types.int8), types.CPointer(types.int32)
        signature = types.void(x, w, types.int64, types.int64, out)

        def generate(context, builder, signature, args):
            _emit(builder, args, rows, channels)
            return context.get_dummy_value()

        return signature, generate

    return dot


_one1, _one2, _one3, _one4, _one5 = (_dot_tile(rows, 1) for rows in range(1, MAX_ROWS + 1))
_all1, _all2, _all3, _all4, _all5 = (_dot_tile(rows, CHANNELS) for rows in range(1, MAX_ROWS + 1))


@compiled()
def dot_channel(rows, x, w, stride, size, out):
    """`out[r * OUT_STRIDE] = sum_k x[r * stride + k] * w[k]` for 1 to MAX_ROWS rows, exact in int32."""
    if rows == 1:
        _one1(x, w, stride, size, out)
    elif rows == 2:
        _one2(x, w, stride, size, out)
    elif rows == 3:
        _one3(x, w, stride, size, out)
    elif rows == 4:
        _one4(x, w, stride, size, out)
    else:
        _one5(x, w, stride, size, out)


@compiled()
def dot_channels(rows, x, w, stride, size, out):
    """The same for CHANNELS weight rows, `stride` apart: `out[r * OUT_STRIDE + c]`."""
    if rows == 1:
        _all1(x, w, stride, size, out)
    elif rows == 2:
        _all2(x, w, stride, size, out)
    elif rows == 3:
        _all3(x, w, stride, size, out)
    elif rows == 4:
        _all4(x, w, stride, size, out)
    else:
        _all5(x, w, stride, size, out)
