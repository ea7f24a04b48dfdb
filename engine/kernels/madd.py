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


PADDING = 32  # rows are padded with zeros to a multiple of so many terms
LANES = 32 if "avx512bw" in _host_features() else 16  # int16 products of one chunk
MAX_ROWS = 9  # activation rows that share one read of the weights: accumulators of so many fit in the registers
OUT_STRIDE = 16  # int32 sums between two rows' results: they lie channel by channel
MAX_TERMS = 4096  # 4,095 * 127 * 4,096 < 2^31: longer rows are summed in chunks

_I16, _I32, _I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)


def _vector(kind: ir.Type, lanes: int) -> ir.VectorType:
    return ir.VectorType(kind, lanes)


def _emit(builder: ir.IRBuilder, args: tuple[ir.Value, ...], rows: int) -> None:
    """A loop over chunks of LANES that keeps one vector of sums for each row; then the sums to `out`."""
    x, stride, w, size, out = args
    half = _vector(_I32, LANES // 2)
    entry, loop, done = builder.block, builder.append_basic_block("chunks"), builder.append_basic_block("sums")
    builder.branch(loop)
    builder.position_at_end(loop)
    at = builder.phi(_I64)
    sums = [builder.phi(half) for _ in range(rows)]
    weights = _load(builder, w, at, ir.IntType(8))
    grown = []
    for row in range(rows):
        place = builder.add(builder.mul(stride, _I64(row)), at)
        products = builder.mul(_load(builder, x, place, _I16), weights)
        grown.append(builder.add(sums[row], _add_neighbours(builder, products)))
    following = builder.add(at, _I64(LANES))
    at.add_incoming(_I64(0), entry)
    at.add_incoming(following, loop)
    for before, after in zip(sums, grown, strict=True):
        before.add_incoming(ir.Constant(half, None), entry)
        before.add_incoming(after, loop)
    builder.cbranch(builder.icmp_signed("<", following, size), loop, done)
    builder.position_at_end(done)
    for first in range(0, rows, 4):
        _store_totals(builder, grown[first : first + 4], out, first)


def _load(builder: ir.IRBuilder, base: ir.Value, at: ir.Value, kind: ir.Type) -> ir.Value:
    """LANES integers from `base[at:]`, widened to int32."""
    place = builder.bitcast(builder.gep(base, [at]), _vector(kind, LANES).as_pointer())
    return builder.sext(builder.load(place, align=kind.width // 8), _vector(_I32, LANES))


def _add_neighbours(builder: ir.IRBuilder, v: ir.Value) -> ir.Value:
    lanes = v.type.count
    even, odd = (ir.Constant(_vector(_I32, lanes // 2), list(range(first, lanes, 2))) for first in (0, 1))
    return builder.add(builder.shuffle_vector(v, v, even), builder.shuffle_vector(v, v, odd))


def _store_totals(builder: ir.IRBuilder, vectors: list[ir.Value], out: ir.Value, first: int) -> None:
    """The sum of each vector's lanes to `out[(first + i) * OUT_STRIDE]`; up to four vectors are folded together."""
    count = len(vectors)
    while len(vectors) & (len(vectors) - 1):
        vectors = [*vectors, vectors[-1]]  # a power of two: the copy's sum is not stored
    width = 1  # vectors interleaved in each of those left
    while len(vectors) > 1:
        vectors = [_fold_pair(builder, low, high, width) for low, high in zip(vectors[::2], vectors[1::2], strict=True)]
        width *= 2
    (v,) = vectors
    while v.type.count > width:
        half = v.type.count // 2
        v = builder.add(_shuffle(builder, v, v, range(half)), _shuffle(builder, v, v, range(half, 2 * half)))
    for i in range(count):
        place = builder.gep(out, [_I64((first + i) * OUT_STRIDE)])
        builder.store(builder.extract_element(v, _I32(i)), place)


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


def _dot_rows(rows: int) -> Callable[..., Any]:
    @intrinsic
    def dot(context, x, stride, w, size, out):
        signature = types.void(
            types.CPointer(types.int16),
            types.int64,
            types.CPointer(types.int8),
            types.int64,
            types.CPointer(types.int32),
        )

        def generate(context, builder, signature, args):
            _emit(builder, args, rows)
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


_d1, _d2, _d3, _d4, _d5, _d6, _d7, _d8, _d9 = (_dot_rows(rows) for rows in range(1, MAX_ROWS + 1))


@compiled()
def dot_rows(rows, x, stride, w, size, out):
    """`out[r * OUT_STRIDE] = sum_k x[r * stride + k] * w[k]` for `rows` rows, exact in int32."""
    if rows == 1:
        _d1(x, stride, w, size, out)
    elif rows == 2:
        _d2(x, stride, w, size, out)
    elif rows == 3:
        _d3(x, stride, w, size, out)
    elif rows == 4:
        _d4(x, stride, w, size, out)
    elif rows == 5:
        _d5(x, stride, w, size, out)
    elif rows == 6:
        _d6(x, stride, w, size, out)
    elif rows == 7:
        _d7(x, stride, w, size, out)
    elif rows == 8:
        _d8(x, stride, w, size, out)
    else:
        _d9(x, stride, w, size, out)
