"""Vectors in LLVM IR: loading, spreading and summing their lanes, as code that the compiler may not reorder."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

I32, I64, F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()


def host_features() -> set[str]:
    """What this processor can do, in LLVM's words."""
    return {name for name, there in binding.get_host_cpu_features().items() if there}


_FUSED = not {"fma", "neon"}.isdisjoint(host_features())  # elsewhere a fused multiply-add is a call for each number


def vector(kind: ir.Type, lanes: int) -> ir.VectorType:
    """The type of `lanes` numbers of one kind."""
    return ir.VectorType(kind, lanes)


def place(builder: ir.IRBuilder, start: ir.Value, offset: ir.Value, kind: ir.VectorType) -> ir.Value:
    """Where a vector of `kind` lies, `offset` elements behind `start`."""
    return builder.bitcast(builder.gep(start, [offset]), kind.as_pointer())


def spread(builder: ir.IRBuilder, value: ir.Value, kind: ir.VectorType) -> ir.Value:
    """A vector with `value` in every lane."""
    empty = ir.Constant(kind, ir.Undefined)
    return shuffle(builder, builder.insert_element(empty, value, I32(0)), empty, [0] * kind.count)


def add_product(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, sum_: ir.Value) -> ir.Value:
    """`a * b + sum_` of float32 vectors, rounded once where the processor can."""
    if not _FUSED:
        return builder.fadd(sum_, builder.fmul(a, b))
    function = ir.FunctionType(a.type, [a.type] * 3)
    name = f"llvm.fma.v{a.type.count}f32"
    return builder.call(cgutils.get_or_insert_function(builder.module, function, name), [a, b, sum_])


def totals(builder: ir.IRBuilder, vectors: list[ir.Value], add: Callable[..., ir.Value]) -> ir.Value:
    """A vector with the sum of each vector's lanes, for a power of two of vectors: they are folded together.

    Every vector's lanes are added in the same order.
    """
    width = 1  # vectors interleaved in each of those left
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [_fold_pair(builder, low, high, width, add) for low, high in pairs]
        width *= 2
    (v,) = vectors
    while v.type.count > width:
        half = v.type.count // 2
        v = add(shuffle(builder, v, v, range(half)), shuffle(builder, v, v, range(half, 2 * half)))
    return v


def _fold_pair(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, width: int, add: Callable[..., ir.Value]) -> ir.Value:
    """Halve two vectors and put them into one: groups of `width` lanes of `a` and of `b` alternate."""
    lanes = a.type.count
    first, second = (
        [source + group + i for group in range(offset, lanes, 2 * width) for source in (0, lanes) for i in range(width)]
        for offset in (0, width)
    )
    return add(shuffle(builder, a, b, first), shuffle(builder, a, b, second))


def shuffle(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, lanes: Iterable[int]) -> ir.Value:
    """The chosen lanes of two vectors, `b`'s counted behind `a`'s."""
    chosen = list(lanes)
    return builder.shuffle_vector(a, b, ir.Constant(vector(I32, len(chosen)), chosen))


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
        return builder.bitcast(args[0], F32)

    return types.float32(types.int32), generate
