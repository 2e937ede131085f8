"""How channels pass through matrix products and attention."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from types import SimpleNamespace as Arguments

from anywidth.planning.trace.cursor import Cursor
from anywidth.planning.trace.solver import TracedAxis, scaled
from anywidth.planning.trace.value import Traced

# Entries of half precision in 16 bytes.
ALIGNED = 8


def matmul(cursor: Cursor, a: Arguments) -> Traced:
    first = a.self
    names = ("other", "mat2", "vec", "tensor")
    second = next(getattr(a, name) for name in names if hasattr(a, name))
    inner = second.axes[-2] if len(second.shape) > 1 else second.axes[0]
    cursor.unify(first.axes[-1], inner)
    _keep_classes(cursor, [inner])
    left = first.axes[-2:-1]
    right = second.axes[-1:] if len(second.shape) > 1 else ()
    _weigh(cursor, first, left, [inner])
    _weigh(cursor, second, right, [inner])
    batch_shape = cursor.shape[: len(cursor.shape) - len(left) - len(right)]
    batch = cursor.broadcast([v.leading(2) for v in (first, second)], batch_shape)
    value = cursor.output([*batch, *left, *right])
    _attend(cursor, [first, second], [*value.axes, inner])
    cursor.count(value, [(first.shape[-1], first.axes[-1])])
    return value


def _keep_classes(cursor: Cursor, summed: Sequence[TracedAxis]) -> None:
    """Of fewer classes, a sum that leaves the network says something else."""
    for axis in summed if cursor.leaves else ():
        cursor.solver.fix(axis, f"reduced to an output of the model by {cursor.place}")


def _weigh(
    cursor: Cursor, factor: Traced, made: Sequence[TracedAxis], summed: Sequence[TracedAxis]
) -> None:
    """Reports the axes that a factor makes and sums over, if it is a parameter: a layer then.

    A product of parameters alone is none: spectral norm looks how large a weight is.
    """
    if not cursor.is_batched or not cursor.found.is_parameter(factor):
        return
    path, _, key = str(factor.source).rpartition(".")
    layer = path if path and key == "weight" else str(factor.source)
    if len(factor.shape) > 1:
        cursor.found.readers += [(layer, axis) for axis in summed]
        for axis in made:
            cursor.make(layer, axis, factor, can_fold=False)
    cursor.found.made += made
    cursor.found.summed += summed


def _attend(cursor: Cursor, factors: Sequence[Traced], axes: Sequence[TracedAxis]) -> None:
    """Reports the axes of a product, if what depends on the input is multiplied with its like."""
    found = cursor.found
    if not any(found.is_parameter(factor) or found.is_constant(factor) for factor in factors):
        found.attended += axes


def addmm(cursor: Cursor, a: Arguments) -> Traced:
    first, second = (a.mat1, a.mat2) if hasattr(a, "mat1") else (a.batch1, a.batch2)
    value = matmul(cursor, Arguments(self=first, other=second))
    cursor.broadcast([value, a.self], value.shape)
    return value


def grouped(cursor: Cursor, a: Arguments) -> Traced:
    """Rows in groups, each multiplied by a matrix of its own: the experts of a mixture."""
    rows, weight = (a.input, a.weight) if hasattr(a, "input") else (a.self, a.mat2)
    if len(rows.shape) != 2 or len(weight.shape) != 3:
        return cursor.keep_whole(a, f"multiplied in groups by {cursor.place}")
    experts, inner, made = (weight.axes[0], *(_aligned(cursor, weight, dim) for dim in (1, 2)))
    cursor.solver.fix(experts, f"experts of {cursor.layer or cursor.op}")
    cursor.unify(rows.axes[1], inner)
    bias = getattr(a, "bias", None)
    if bias is not None:
        cursor.unify(bias.axes[-1], made)
    _weigh(cursor, weight, [made], [inner])
    value = cursor.output([rows.axes[0], made])
    cursor.count(value, [(rows.shape[1], rows.axes[1])])
    return value


def _aligned(cursor: Cursor, weight: Traced, dim: int) -> TracedAxis:
    """An axis whose neighbours stay together: these kernels read 16 bytes at once."""
    axis, size = weight.axes[dim], weight.shape[dim]
    entries = math.gcd(size, ALIGNED)
    if axis is not None and entries > 1:
        cursor.in_units(axis, size // entries, entries)
    return axis


def distances(cursor: Cursor, a: Arguments) -> Traced:
    """Of each row of one tensor to each of another: counted like their products."""
    inner = cursor.unify(a.x1.axes[-1], a.x2.axes[-1])
    _weigh(cursor, a.x1, a.x1.axes[-2:-1], [inner])
    _weigh(cursor, a.x2, a.x2.axes[-2:-1], [inner])
    batch = cursor.broadcast([v.leading(2) for v in (a.x1, a.x2)], cursor.shape[:-2])
    value = cursor.output([*batch, a.x1.axes[-2], a.x2.axes[-2]])
    cursor.count(value, [(a.x1.shape[-1], a.x1.axes[-1])])
    return value


def bilinear(cursor: Cursor, a: Arguments) -> Traced:
    made, first, second = a.weight.axes
    for value, inner in ((a.input1, first), (a.input2, second)):
        cursor.unify(value.axes[-1], inner)
    if a.bias is not None:
        cursor.unify(a.bias.axes[0], made)
    for name, axis in (("out", made), ("in1", first), ("in2", second)):
        cursor.attribute(f"{name}_features", axis)
    lead = cursor.broadcast([v.leading(1) for v in (a.input1, a.input2)], cursor.shape[:-1])
    value = cursor.output([*lead, made])
    sizes = zip(a.weight.shape[1:], (first, second), strict=True)
    cursor.count(value, list(sizes))
    cursor.found.readers += [(cursor.layer, first), (cursor.layer, second)]
    cursor.make(cursor.layer, made, a.weight, can_fold=False)
    return value


def einsum(cursor: Cursor, a: Arguments) -> Traced:
    terms, right = spelled_out(a.equation, [len(tensor.shape) for tensor in a.tensors])
    left = "".join(terms)
    axes: dict[str, TracedAxis] = {}
    sizes: dict[str, int] = {}
    for term, tensor in zip(terms, a.tensors, strict=True):
        for letter, size, axis in zip(term, tensor.shape, tensor.axes, strict=True):
            if size > 1 or letter not in axes:
                is_met = sizes.get(letter, 1) > 1
                axes[letter] = cursor.unify(axes[letter], axis) if is_met else axis
                sizes[letter] = size
    _keep_classes(cursor, [axis for letter, axis in axes.items() if letter not in right])
    for term, tensor in zip(terms, a.tensors, strict=True):
        own = [axes[letter] for letter in term if left.count(letter) == 1]
        _weigh(cursor, tensor, own, [axes[letter] for letter in term if letter not in right])
    _attend(cursor, a.tensors, list(axes.values()))
    for letters in _products(terms, right):
        cursor.count(Traced((), ()), [(sizes[x], axes[x]) for x in letters])
    return cursor.output([axes[letter] for letter in right])


def tensordot(cursor: Cursor, a: Arguments) -> Traced:
    """A sum over some axes of two tensors; the others stay in their order."""
    first = list(string.ascii_letters[: len(a.self.shape)])
    second = list(string.ascii_letters[len(first) : len(first) + len(a.other.shape)])
    for own, other in zip(a.dims_self, a.dims_other, strict=True):
        second[other] = first[own]
    kept = [x for x in first + second if (x in first) != (x in second)]
    equation = f"{''.join(first)},{''.join(second)}->{''.join(kept)}"
    return einsum(cursor, Arguments(equation=equation, tensors=[a.self, a.other]))


def spelled_out(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """The letters of each factor and of the result, with those that `...` stands for."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    free = [x for x in string.ascii_letters if x not in equation]
    hidden = [rank - len(term.replace("...", "")) for term, rank in zip(terms, ranks, strict=True)]
    most = "".join(free[: max(hidden)])
    spelled = [
        term.replace("...", most[len(most) - count :])
        for term, count in zip(terms, hidden, strict=True)
    ]
    if not arrow:
        letters = left.replace(",", "").replace(".", "")
        right = "..." + "".join(x for x in sorted(letters) if letters.count(x) == 1)
    return spelled, right.replace("...", most)


def _products(terms: Sequence[str], right: str) -> list[list[str]]:
    """The letters of each product of two, from left to right as torch works it out.

    What one factor alone has and nothing asks for later is summed before. Where nothing is summed
    over, entries are multiplied one by one, which is not counted elsewhere either.
    """
    found = []
    done = terms[0]
    for number, term in enumerate(terms[1:], 2):
        later = {*right, *"".join(terms[number:])}
        both = dict.fromkeys(done + term)
        letters = [x for x in both if x in later or (x in done and x in term)]
        if not later.issuperset(letters):
            found.append(letters)
        done = "".join(x for x in both if x in later)
    return found


def _shared_heads(queries: Traced, tensor: Traced) -> Traced:
    """Keys or values as every head of the queries sees them: each in turn for some neighbours."""
    if tensor.shape[-3] == 1:
        return tensor
    heads = scaled(tensor.axes[-3], queries.shape[-3] // tensor.shape[-3])
    return Traced(
        (*tensor.shape[:-3], queries.shape[-3], *tensor.shape[-2:]),
        (*tensor.axes[:-3], heads, *tensor.axes[-2:]),
    )


def attention(cursor: Cursor, a: Arguments) -> Traced:
    """softmax(q k^T) v: q, k share their features, k and v their positions, all their heads."""
    q, k, v = a.query, a.key, a.value
    cursor.unify(q.axes[-1], k.axes[-1])
    cursor.unify(k.axes[-2], v.axes[-2])
    if getattr(a, "enable_gqa", False):
        k, v = (_shared_heads(q, t) for t in (k, v))
    batch = cursor.broadcast([t.leading(2) for t in (q, k, v)], cursor.shape[:-2])
    scores = Traced((*q.shape[:-1], k.shape[-2]), (*batch, q.axes[-2], k.axes[-2]))
    if isinstance(a.attn_mask, Traced):
        cursor.broadcast([scores, a.attn_mask], scores.shape)
    value = cursor.output([*batch, q.axes[-2], v.axes[-1]])
    _attend(cursor, [q, k, v], [*batch, q.axes[-1], v.axes[-1]])
    cursor.count(scores, [(q.shape[-1], q.axes[-1])])
    cursor.count(value, [(k.shape[-2], k.axes[-2])])
    return value
