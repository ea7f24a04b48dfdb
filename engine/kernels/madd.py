"""Exact integer dot products of a few int16 rows with an int8 row, as vector code that LLVM lowers well.

The products are written as LLVM IR in the form `sext, mul, add neighbours`, which becomes `vpmaddwd` on AVX2,
`vpdpwssd` where there is VNNI, and whatever else a processor has: numba's own loops vectorise in this way for one row
and not for several. All sums are int32 and exact, so neither vector width nor row count can change a bit of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

from engine.kernels.compile import compiled


def _host_features() -> set[str]:
    return {name for name, there in binding.get_host_cpu_features().items() if there}


_WIDE = "avx512bw" in _host_features()

PADDING = 32  # rows are padded with zeros to a multiple of so many terms
LANES = 32 if _WIDE else 16  # int16 products of one chunk
MAX_ROWS = 5  # activation rows of a tile
CHANNELS = 4 if _WIDE else 2  # weight rows of a tile: its rows x channels of sums must fit in the vector registers
OUT_STRIDE = 16  # int32 sums between two activation rows' results: they lie channel by channel
MAX_TERMS = 4096  # 4,095 * 127 * 4,096 < 2^31: longer rows are summed in chunks

_I16, _I32, _I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)


def _vector(kind: ir.Type, lanes: int) -> ir.VectorType:
    return ir.VectorType(kind, lanes)


def _emit(builder: ir.IRBuilder, args: tuple[ir.Value, ...], rows: int, channels: int) -> None:
    """A loop over chunks of LANES that keeps a vector of sums for each row and channel; then the sums to `out`."""
    x, w, stride, size, out = args
    half = _vector(_I32, LANES // 2)
    entry, loop, done = builder.block, builder.append_basic_block("chunks"), builder.append_basic_block("sums")
    builder.branch(loop)
    builder.position_at_end(loop)
    at = builder.phi(_I64)
    sums = [[builder.phi(half) for _ in range(channels)] for _ in range(rows)]
    weights = [_load(builder, w, _offset(builder, stride, channel, at), ir.IntType(8)) for channel in range(channels)]
    grown = []
    for row in range(rows):
        activations = _load(builder, x, _offset(builder, stride, row, at), _I16)
        products = [_add_neighbours(builder, builder.mul(activations, weight)) for weight in weights]
        grown.append([builder.add(sum_, more) for sum_, more in zip(sums[row], products, strict=True)])
    following = builder.add(at, _I64(LANES))
    at.add_incoming(_I64(0), entry)
    at.add_incoming(following, loop)
    for row in range(rows):
        for before, after in zip(sums[row], grown[row], strict=True):
            before.add_incoming(ir.Constant(half, None), entry)
            before.add_incoming(after, loop)
    builder.cbranch(builder.icmp_signed("<", following, size), loop, done)
    builder.position_at_end(done)
    for row in range(rows):
        place = builder.bitcast(builder.gep(out, [_I64(row * OUT_STRIDE)]), _vector(_I32, channels).as_pointer())
        builder.store(_totals(builder, grown[row]), place, align=4)


def _offset(builder: ir.IRBuilder, stride: ir.Value, index: int, at: ir.Value) -> ir.Value:
    return builder.add(builder.mul(stride, _I64(index)), at)


def _load(builder: ir.IRBuilder, base: ir.Value, at: ir.Value, kind: ir.Type) -> ir.Value:
    """LANES integers from `base[at:]`, widened to int32."""
    place = builder.bitcast(builder.gep(base, [at]), _vector(kind, LANES).as_pointer())
    return builder.sext(builder.load(place, align=kind.width // 8), _vector(_I32, LANES))


def _add_neighbours(builder: ir.IRBuilder, v: ir.Value) -> ir.Value:
    """Half as many lanes: each is the sum of two neighbours."""
    return builder.add(*(_shuffle(builder, v, v, range(first, v.type.count, 2)) for first in (0, 1)))


def _totals(builder: ir.IRBuilder, vectors: list[ir.Value]) -> ir.Value:
    """A vector with the sum of each vector's lanes, for 1, 2 or 4 vectors: they are folded together."""
    width = 1  # vectors interleaved in each of those left
    while len(vectors) > 1:
        vectors = [_fold_pair(builder, low, high, width) for low, high in zip(vectors[::2], vectors[1::2], strict=True)]
        width *= 2
    (v,) = vectors
    while v.type.count > width:
        half = v.type.count // 2
        v = builder.add(_shuffle(builder, v, v, range(half)), _shuffle(builder, v, v, range(half, 2 * half)))
    return v


def _fold_pair(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, width: int) -> ir.Value:
    """Halve two vectors and put them into one: groups of `width` lanes of `a` and of `b` alternate."""
    lanes = a.type.count
    first, second = (
        [source + group + i for group in range(offset, lanes, 2 * width) for source in (0, lanes) for i in range(width)]
        for offset in (0, width)
    )
    return builder.add(_shuffle(builder, a, b, first), _shuffle(builder, a, b, second))


def _shuffle(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, lanes: Iterable[int]) -> ir.Value:
    chosen = list(lanes)
    return builder.shuffle_vector(a, b, ir.Constant(_vector(_I32, len(chosen)), chosen))


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


@intrinsic
def pointer(context, array, offset):
    """The address of element `offset` of a contiguous array."""

    def generate(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.gep(data, [args[1]])

    return types.CPointer(array.dtype)(array, types.int64), generate


@intrinsic
def float_from_bits(context, bits):
    """The float32 whose bits are an int32's."""

    def generate(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), generate


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
