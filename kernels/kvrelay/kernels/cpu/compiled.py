"""Kernels for a CPU, compiled by numba: float32, and bfloat16 as its 16 bits, with arithmetic in float32.

Tensors come by address, as numbers among a kernel's arguments (see `openmp`). Loops over rows are left to the compiler's
vectorizer. `scores` and `mix`, the two products of attention, are written in vectors, since it does not keep their sums in registers.

All in one file: numba's cache on disk knows a kernel as out of date by the file that holds it, and by no other.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from kvrelay.kernels.cpu.openmp import FASTMATH, Kernel, barrier, thread, threads

PIECE = 256
"""Tokens of a context that are one piece of work, whatever else is in the batch: a result depends on neither batch nor threads."""
AHEAD = 32
"""Tokens ahead of the one that is read, whose keys are asked for: a row of one head is too short for the processor to guess on."""
LANES = 8
"""What `dim` must be a multiple of. Vectors have twice as many where it allows; the compiler splits what the processor cannot do."""

_INT16, _INT32, _INT64, _FLOAT = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_LOG2E = np.float32(1.44269504088896341)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_LEAST = np.float32(-87.0)
"""e to it is still a normal number."""
_ELEMENTS = {2: types.uint16, 4: types.float32}


@intrinsic(prefer_literal=True)
def tensor_at(typing_context: Any, address: Any, itemsize: Any) -> Any:
    """Pointer to elements of 2 (bfloat16) or 4 bytes (float32)."""
    pointer = types.CPointer(_ELEMENTS[itemsize.literal_value])
    return pointer(address, itemsize), lambda context, b, signature, values: b.inttoptr(
        values[0], context.get_value_type(pointer)
    )


def _function(result: types.Type, build: Callable[[Any, Any], Any]) -> Any:
    """A function of one argument whose instructions `build` writes."""

    @intrinsic
    def function(typing_context: Any, argument: Any) -> Any:
        return result(argument), lambda context, b, signature, values: build(b, values[0])

    return function


ints_at = _function(types.CPointer(types.int32), lambda b, address: b.inttoptr(address, _INT32.as_pointer()))
longs_at = _function(types.CPointer(types.int64), lambda b, address: b.inttoptr(address, _INT64.as_pointer()))
_power_of_two = _function(
    types.float32, lambda b, n: b.bitcast(b.shl(b.add(b.fptosi(n, _INT32), _INT32(127)), _INT32(23)), _FLOAT)
)


@intrinsic
def load(typing_context: Any, pointer: Any, index: Any) -> Any:
    """One element, as float32."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> Any:
        element = b.load(b.gep(values[0], [values[1]]))
        return element if pointer.dtype is types.float32 else _widened(b, element)

    return types.float32(pointer, index), generate


@intrinsic
def store(typing_context: Any, pointer: Any, index: Any, value: Any) -> Any:
    """A float32, as one element: the nearest."""

    def generate(context: Any, b: Any, signature: Any, values: Any) -> None:
        pointed, at, number = values
        b.store(number if pointer.dtype is types.float32 else _nearest_half(b, number), b.gep(pointed, [at]))

    return types.void(pointer, index, types.float32), generate


def _widened(b: Any, halves: Any) -> Any:
    """Floats of bfloat16's bits; of one or of a vector of them."""
    lanes = halves.type.count if isinstance(halves.type, ir.VectorType) else 0
    words, floats = (_lanes(_INT32, lanes), _lanes(_FLOAT, lanes)) if lanes else (_INT32, _FLOAT)
    return b.bitcast(b.shl(b.zext(halves, words), ir.Constant(words, [16] * lanes if lanes else 16)), floats)


def _lanes(element: ir.Type, count: int) -> ir.Type:
    return ir.VectorType(element, count)


def _nearest_half(b: Any, number: Any) -> Any:
    """Ties to even; a NaN stays one."""
    bits = b.bitcast(number, _INT32)
    odd = b.and_(b.lshr(bits, _INT32(16)), _INT32(1))
    up = b.add(bits, b.add(odd, _INT32(0x7FFF)))
    kept = b.select(b.fcmp_unordered("uno", number, number), _INT32(0x7FC00000), up)
    return b.trunc(b.lshr(kept, _INT32(16)), _INT16)


@njit(fastmath={"contract"}, error_model="numpy", forceinline=True)
def exp(x: Any) -> Any:
    """e^x in float32 for x ≤ 0, within 2 units in the last place; 0 under -87, NaN of NaN. Cephes' expf (Moshier 1992): no sum
    may be taken in another order."""
    n = np.floor((x if x > _LEAST else _LEAST) * _LOG2E + np.float32(0.5))
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    y = p * r * r + r + np.float32(1.0)
    return np.float32(0.0) if x < _LEAST else y * _power_of_two(np.float32(n))


def _vector(b: Any, pointer: Any, index: Any, lanes: int) -> Any:
    """Elements from `index` on, as floats."""
    first, element = b.gep(pointer, [index]), pointer.type.pointee
    loaded = b.load(b.bitcast(first, _lanes(element, lanes).as_pointer()), align=2 if element == _INT16 else 4)
    return loaded if element == _FLOAT else _widened(b, loaded)


def _prefetch(b: Any, pointer: Any, index: Any, dim: int) -> None:
    """The lines of a row on their way into the cache."""
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), _INT32, _INT32, _INT32])
    function = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0i8")
    line = 64 // (2 if pointer.type.pointee == _INT16 else 4)
    for i in range(0, dim, line):
        address = b.bitcast(b.gep(pointer, [b.add(index, _INT64(i))]), ir.IntType(8).as_pointer())
        b.call(function, [address, _INT32(0), _INT32(3), _INT32(1)])


def _spread(b: Any, number: Any, lanes: int) -> Any:
    one = b.insert_element(ir.Constant(_lanes(_FLOAT, lanes), ir.Undefined), number, _INT32(0))
    return b.shuffle_vector(one, one, ir.Constant(_lanes(_INT32, lanes), [0] * lanes))


def _multiply_add(b: Any, x: Any, y: Any, z: Any) -> Any:
    name = f"llvm.fmuladd.v{x.type.count}f32"
    return b.call(cgutils.get_or_insert_function(b.module, ir.FunctionType(x.type, [x.type] * 3), name), [x, y, z])


def _total(b: Any, vector: Any) -> Any:
    """Of the lanes, halves on halves."""
    lanes = width = vector.type.count
    while width > 1:
        width //= 2
        order = ir.Constant(_lanes(_INT32, lanes), [(i + width) % lanes for i in range(lanes)])
        vector = b.fadd(vector, b.shuffle_vector(vector, vector, order))
    return b.extract_element(vector, _INT32(0))


def _widths(dim: int) -> tuple[int, range]:
    """Lanes of a vector, and where the vectors of a row start."""
    lanes = 2 * LANES if dim % (2 * LANES) == 0 else LANES
    return lanes, range(0, dim, lanes)


@intrinsic(prefer_literal=True)
def scores(
    typing_context: Any,
    dim: Any,
    group: Any,
    q: Any,
    keys: Any,
    values: Any,
    rows: Any,
    count: Any,
    out: Any,
    pitch: Any,
) -> Any:
    """out[g × pitch + t] = q[g] · keys[rows[t] : rows[t] + dim] for t under `count`; q is float32 [group, dim]."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        _, _, q, keys, values, rows, count, out, pitch = arguments
        lanes, parts = _widths(dim.literal_value)
        with cgutils.for_range(b, count) as loop:
            row = b.load(b.gep(rows, [loop.index]))
            ahead = b.add(loop.index, _INT64(AHEAD))
            ahead = b.select(b.icmp_signed("<", ahead, count), ahead, loop.index)
            _prefetch(b, keys, b.load(b.gep(rows, [ahead])), dim.literal_value)
            _prefetch(b, values, row, dim.literal_value)
            key = {i: _vector(b, keys, b.add(row, _INT64(i)), lanes) for i in parts}
            for g in range(group.literal_value):
                total = ir.Constant(_lanes(_FLOAT, lanes), [0.0] * lanes)
                for i in parts:
                    total = _multiply_add(b, _vector(b, q, _INT64(g * dim.literal_value + i), lanes), key[i], total)
                b.store(_total(b, total), b.gep(out, [b.add(b.mul(pitch, _INT64(g)), loop.index)]))

    return types.void(dim, group, q, keys, values, rows, count, out, pitch), generate


@intrinsic(prefer_literal=True)
def mix(
    typing_context: Any, dim: Any, group: Any, weights: Any, pitch: Any, values: Any, rows: Any, count: Any, out: Any
) -> Any:
    """out[g × dim + i] = Σ over t under `count` of weights[g × pitch + t] × values[rows[t] + i]."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        _, _, weights, pitch, values, rows, count, out = arguments
        lanes, parts = _widths(dim.literal_value)
        zero = ir.Constant(_lanes(_FLOAT, lanes), [0.0] * lanes)
        sums = {(g, i): cgutils.alloca_once(b, zero.type) for g in range(group.literal_value) for i in parts}
        for sum_ in sums.values():
            b.store(zero, sum_)
        with cgutils.for_range(b, count) as loop:
            row = b.load(b.gep(rows, [loop.index]))
            value = {i: _vector(b, values, b.add(row, _INT64(i)), lanes) for i in parts}
            for g in range(group.literal_value):
                weight = _spread(b, b.load(b.gep(weights, [b.add(b.mul(pitch, _INT64(g)), loop.index)])), lanes)
                for i in parts:
                    b.store(_multiply_add(b, weight, value[i], b.load(sums[g, i])), sums[g, i])
        for (g, i), sum_ in sums.items():
            into = b.gep(out, [_INT64(g * dim.literal_value + i)])
            b.store(b.load(sum_), b.bitcast(into, zero.type.as_pointer()), align=4)

    return types.void(dim, group, weights, pitch, values, rows, count, out), generate


@functools.cache
def add_norm_kernel(itemsize: int) -> Kernel:
    """(rows, width, hidden, delta or 0, weight, eps, out): hidden += delta, as it is stored; then its norm."""

    def add_norm(a: Any) -> None:
        rows, width, has_delta = a[0], a[1], a[3] != 0
        hidden, delta, out = tensor_at(a[2], itemsize), tensor_at(a[3], itemsize), tensor_at(a[6], itemsize)
        weight, eps = tensor_at(a[4], 4), tensor_at(a[5], 4)[0]
        for row in range(rows * thread() // threads(), rows * (thread() + 1) // threads()):
            if has_delta:
                for i in range(row * width, (row + 1) * width):
                    store(hidden, i, load(hidden, i) + load(delta, i))
            _norm(hidden, row * width, width, weight, 0, eps, out)

    return Kernel(add_norm)


@njit(fastmath=FASTMATH, error_model="numpy", forceinline=True)
def _norm(x: Any, base: Any, width: Any, weight: Any, weight_base: Any, eps: Any, out: Any) -> None:
    squares = np.float32(0.0)
    for i in range(base, base + width):
        squares += load(x, i) * load(x, i)
    scale = np.float32(1.0) / np.sqrt(squares / np.float32(width) + eps)
    for i in range(width):
        store(out, base + i, load(x, base + i) * scale * weight[weight_base + i])


@functools.cache
def rotate_kernel(itemsize: int) -> Kernel:
    """(tokens, elements a token, heads, dim, x, cos, sin, weight or 0, eps): the first heads of each token, in place, normed first
    where there is a weight [heads, dim]."""

    def rotate(a: Any) -> None:
        tokens, stride, heads, dim, normed = a[0], a[1], a[2], a[3], a[7] != 0
        x, cos, sin = tensor_at(a[4], itemsize), tensor_at(a[5], itemsize), tensor_at(a[6], itemsize)
        weight, eps = tensor_at(a[7], 4), tensor_at(a[8], 4)
        for token in range(tokens * thread() // threads(), tokens * (thread() + 1) // threads()):
            for head in range(heads):
                low = token * stride + head * dim
                if normed:
                    _norm(x, low, dim, weight, head * dim, eps[0], x)
                _turn(x, low, dim // 2, cos, sin, token * dim)

    return Kernel(rotate)


@njit(fastmath=FASTMATH, error_model="numpy", forceinline=True)
def _turn(x: Any, low: Any, half: Any, cos: Any, sin: Any, angle: Any) -> None:
    for i in range(half):
        a, b = load(x, low + i), load(x, low + half + i)
        store(x, low + i, a * load(cos, angle + i) + b * load(sin, angle + i))
        store(x, low + half + i, b * load(cos, angle + half + i) + a * load(sin, angle + half + i))


@functools.cache
def silu_gate_kernel(itemsize: int) -> Kernel:
    """(rows, width, gate and up [rows, 2 width], out): silu(gate) × up."""

    def silu_gate(a: Any) -> None:
        rows, width = a[0], a[1]
        gate_up, out = tensor_at(a[2], itemsize), tensor_at(a[3], itemsize)
        for row in range(rows * thread() // threads(), rows * (thread() + 1) // threads()):
            base = 2 * row * width
            for i in range(width):
                gate = load(gate_up, base + i)
                small = exp(-abs(gate))
                silu = gate * (np.float32(1.0) if gate >= 0 else small) / (np.float32(1.0) + small)
                store(out, row * width + i, silu * load(gate_up, base + width + i))

    return Kernel(silu_gate)


def decode_room(dim: int, group: int) -> int:
    """Bytes that a thread of the kernel for these heads works in."""
    return 8 * PIECE + 4 * (group * (2 * dim + PIECE + 2))


@functools.cache
def decode_kernel(dim: int, group: int, itemsize: int, kv_itemsize: int) -> Kernel:
    """Attention of single tokens over paged KV, where it lies: nothing is gathered, nothing repeated. Stores their own KV first.

    For heads of `dim`, `group` query heads to a KV head, and elements of so many bytes. A unit of work is a piece of a sequence's context
    and a KV head, with its query heads. (pieces, KV heads, block size, width of a block table, elements a token of q, k, v; pieces
    int64 [P, 4]: sequence, first token, tokens, tokens of all pieces up to and with it; block tables int32; context lengths int64;
    scale; room for partial results [P, heads, dim + 2]; room to work in, `decode_room` a thread; q, k, v; cached keys and values; out)
    """
    record = dim + 2  # a partial result: weighted values, top score, sum of weights
    room_bytes = decode_room(dim, group)

    def decode(a: Any) -> None:
        num_pieces, heads, block_size, width = a[0], a[1], a[2], a[3]
        q_stride, k_stride, v_stride = a[4], a[5], a[6]
        pieces, tables, lens = longs_at(a[7]), ints_at(a[8]), longs_at(a[9])
        scale, partial = tensor_at(a[10], 4)[0], tensor_at(a[11], 4)
        q, out = tensor_at(a[13], itemsize), tensor_at(a[18], itemsize)
        new_keys, new_values = tensor_at(a[14], itemsize), tensor_at(a[15], itemsize)
        keys, values = tensor_at(a[16], kv_itemsize), tensor_at(a[17], kv_itemsize)
        me, team = np.int64(thread()), np.int64(threads())
        room = a[12] + me * room_bytes
        rows, queries = longs_at(room), tensor_at(room + 8 * PIECE, 4)
        weights = tensor_at(room + 8 * PIECE + 4 * group * dim, 4)
        mixed = tensor_at(room + 8 * PIECE + 4 * group * (dim + PIECE), 4)
        sums = tensor_at(room + 8 * PIECE + 4 * group * (2 * dim + PIECE), 4)  # [group, 2]: top score, sum of weights
        all_tokens = pieces[4 * num_pieces - 1] * heads
        has_split = False
        for p in range(num_pieces):
            seq, first, count = pieces[4 * p], pieces[4 * p + 1], pieces[4 * p + 2]
            length = lens[seq]
            has_split = has_split or count < length
            for head in range(heads):
                tokens_before = (pieces[4 * p + 3] - count) * heads + count * head
                if tokens_before * team // all_tokens != me:
                    continue
                _find(rows, tables, seq * width, block_size, first, count, heads * dim, head * dim)
                if first + count == length:
                    own = rows[count - 1]
                    for i in range(dim):
                        store(keys, own + i, load(new_keys, seq * k_stride + head * dim + i))
                        store(values, own + i, load(new_values, seq * v_stride + head * dim + i))
                for i in range(group * dim):
                    queries[i] = load(q, seq * q_stride + head * group * dim + i) * scale
                scores(dim, group, queries, keys, values, rows, count, weights, PIECE)
                for g in range(group):
                    _soften(weights, g * PIECE, count, sums, 2 * g)
                mix(dim, group, weights, PIECE, values, rows, count, mixed)
                for g in range(group):
                    top, total = sums[2 * g], sums[2 * g + 1]
                    if count == length:
                        for i in range(dim):
                            store(out, ((seq * heads + head) * group + g) * dim + i, mixed[g * dim + i] / total)
                    else:
                        base = ((p * heads + head) * group + g) * record
                        for i in range(dim):
                            partial[base + i] = mixed[g * dim + i]
                        partial[base + dim], partial[base + dim + 1] = top, total
        if not has_split:
            return
        barrier()
        num_queries = heads * group
        for p in range(num_pieces):
            seq, first, length = pieces[4 * p], pieces[4 * p + 1], lens[pieces[4 * p]]
            if first == 0 and pieces[4 * p + 2] < length:
                for query in range(num_queries * me // team, num_queries * (me + 1) // team):
                    base, into = (p * num_queries + query) * record, (seq * num_queries + query) * dim
                    _join(partial, base, num_queries * record, (length + PIECE - 1) // PIECE, dim)
                    for i in range(dim):
                        store(out, into + i, partial[base + i])

    return Kernel(decode)


@njit(error_model="numpy", forceinline=True)
def _find(rows: Any, tables: Any, table: Any, block_size: Any, first: Any, count: Any, token: Any, head: Any) -> None:
    """Where the rows of tokens from `first` on start, of `token` elements each, `head` elements into them."""
    block, offset = first // block_size, first % block_size
    for t in range(count):
        rows[t] = (np.int64(tables[table + block]) * block_size + offset) * token + head
        offset += 1
        if offset == block_size:
            block, offset = block + 1, 0


@njit(fastmath=FASTMATH, error_model="numpy", forceinline=True)
def _soften(weights: Any, base: Any, count: Any, sums: Any, at: Any) -> None:
    """Scores from `base` on become e to what they are under the top one, which goes to sums[at], and their sum behind it."""
    top = np.float32(-np.inf)
    for t in range(base, base + count):
        top = weights[t] if weights[t] > top else top
    total = np.float32(0.0)
    for t in range(base, base + count):
        weight = exp(weights[t] - top)
        weights[t] = weight
        total += weight
    sums[at], sums[at + 1] = top, total


@njit(fastmath=FASTMATH, error_model="numpy", forceinline=True)
def _join(partial: Any, base: Any, pitch: Any, parts: Any, dim: Any) -> None:
    """Attention of one query over pieces, from their partial results, `pitch` apart, into the first of them."""
    top = np.float32(-np.inf)
    for at in range(base, base + parts * pitch, pitch):
        top = partial[at + dim] if partial[at + dim] > top else top
    total = np.float32(0.0)
    for part in range(parts):
        at = base + part * pitch
        factor = exp(partial[at + dim] - top)
        total += factor * partial[at + dim + 1]
        for i in range(dim):
            before = partial[base + i] if part > 0 else np.float32(0.0)
            partial[base + i] = before + factor * partial[at + i]
    for i in range(dim):
        partial[base + i] /= total
