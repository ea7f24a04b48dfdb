"""Products of a few float32 rows with a panel of weights, as vector code in which every sum has one fixed order.

A panel holds the weights of LANES output channels, input by input: `[inputs, LANES]`. A vector's lanes are channels,
and a channel's sum runs over the inputs from first to last, with fused multiply-adds. The loops for one row and for
several are written by the same few lines, as LLVM IR that grants no freedom to reorder: a row's bits cannot depend on
its neighbours.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.kernels.lanes import F32, I64, add_product, host_features, place, spread, vector

_WIDE = "avx512f" in host_features()
LANES = 32 if _WIDE else 16  # output channels of a panel
TILE = 12 if _WIDE else 6  # rows at a time: their sums, the weights and one input must fit in the vector registers

_VECTOR = vector(F32, LANES)


@intrinsic
def dot_panel(context, rows, x, stride, panel, step, size, out):
    """`out[r * LANES + c] = sum_k x[r * stride + k] * panel[k * step + c]` for 1 to TILE rows and `size` inputs."""
    floats = types.CPointer(types.float32)
    signature = types.void(types.int64, floats, types.int64, floats, types.int64, types.int64, floats)

    def generate(context, builder, signature, args):
        count, *others = args
        entry, done = builder.block, builder.append_basic_block("done")
        cases = []
        for rows in range(1, TILE + 1):
            cases.append(builder.append_basic_block(f"rows{rows}"))
            builder.position_at_end(cases[-1])
            _emit(builder, rows, *others)
            builder.branch(done)
        builder.position_at_end(entry)
        switch = builder.switch(count, done)
        for rows, case in enumerate(cases, start=1):
            switch.add_case(I64(rows), case)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return signature, generate


def _emit(builder, rows, x, stride, panel, step, size, out):
    """A loop over the inputs that keeps a vector of sums for each row; then the sums to `out`."""
    entry, loop, stored = builder.block, builder.append_basic_block("inputs"), builder.append_basic_block("sums")
    starts = [builder.gep(x, [builder.mul(stride, I64(row))]) for row in range(rows)]
    builder.branch(loop)
    builder.position_at_end(loop)
    at = builder.phi(I64)
    sums = [builder.phi(_VECTOR) for _ in range(rows)]
    weights = builder.load(place(builder, panel, builder.mul(at, step), _VECTOR), align=4)
    inputs = [spread(builder, builder.load(builder.gep(start, [at])), _VECTOR) for start in starts]
    grown = [add_product(builder, value, weights, sum_) for value, sum_ in zip(inputs, sums, strict=True)]
    following = builder.add(at, I64(1))
    at.add_incoming(I64(0), entry)
    at.add_incoming(following, loop)
    for before, after in zip(sums, grown, strict=True):
        before.add_incoming(ir.Constant(_VECTOR, None), entry)
        before.add_incoming(after, loop)
    builder.cbranch(builder.icmp_signed("<", following, size), loop, stored)
    builder.position_at_end(stored)
    for row, sum_ in enumerate(grown):
        builder.store(sum_, place(builder, out, I64(row * LANES), _VECTOR), align=4)
