"""How channels pass through matrix products and attention."""

from __future__ import annotations

import string
from collections.abc import Sequence
from types import SimpleNamespace as Arguments

from anywidth.planning.trace.solver import TracedAxis
from anywidth.planning.trace.value import Context, Traced, shape_of


def matmul(context: Context, a: Arguments) -> Traced:
    first = getattr(a, "self", None)
    second = getattr(a, "other", None) or getattr(a, "mat2", None)
    assert isinstance(first, Traced)
    assert isinstance(second, Traced)
    inner = second.axes[-2] if len(second.shape) > 1 else second.axes[0]
    context.unify(first.axes[-1], inner)
    left = first.axes[-2:-1]
    right = second.axes[-1:] if len(second.shape) > 1 else ()
    context.made += [*_learned(context, first, left), *_learned(context, second, right)]
    context.summed += [*_learned(context, first, [inner]), *_learned(context, second, [inner])]
    shape = shape_of(context.meta)
    batch_shape = shape[: len(shape) - len(left) - len(right)]
    batch = context.broadcast(
        [Traced(v.shape[:-2], v.axes[:-2]) for v in (first, second) if len(v.shape) > 2],
        batch_shape,
    )
    value = context.output([*batch, *map(context.live, left), *map(context.live, right)])
    context.cost(value, [(first.shape[-1], context.live(first.axes[-1]))])
    return value


def _learned(context: Context, tensor: Traced, axes: Sequence[TracedAxis]) -> list[TracedAxis]:
    """Those axes of a factor, if it is a parameter."""
    is_parameter = tensor.scale_name is not None and context.is_learned(tensor)
    return list(axes) if is_parameter else []


def addmm(context: Context, a: Arguments) -> Traced:
    first, second = (a.mat1, a.mat2) if hasattr(a, "mat1") else (a.batch1, a.batch2)
    value = matmul(context, Arguments(self=first, other=second))
    context.broadcast([value, a.self], value.shape)
    return Traced(value.shape, tuple(context.live(axis) for axis in value.axes))


def einsum(context: Context, a: Arguments) -> Traced:
    terms, right = _spelled_out(a.equation, [len(tensor.shape) for tensor in a.tensors])
    left = "".join(terms)
    axes: dict[str, TracedAxis] = {}
    sizes: dict[str, int] = {}
    for term, tensor in zip(terms, a.tensors, strict=True):
        for letter, size, axis in zip(term, tensor.shape, tensor.axes, strict=True):
            if size > 1 or letter not in axes:
                axes[letter] = (
                    context.unify(axes[letter], axis) if sizes.get(letter, 1) > 1 else axis
                )
                sizes[letter] = size
    for term, tensor in zip(terms, a.tensors, strict=True):
        own = [axes[letter] for letter in term if left.count(letter) == 1]
        context.made += _learned(context, tensor, own)
        context.summed += _learned(context, tensor, [axes[letter] for letter in term])
    axes = {letter: context.live(axis) for letter, axis in axes.items()}
    value = context.output([axes[letter] for letter in right])
    for letters in _products(terms, right):
        context.cost(Traced((), ()), [(sizes[x], axes[x]) for x in letters])
    return value


def _spelled_out(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
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


def _shared_heads(context: Context, queries: Traced, tensor: Traced) -> Traced:
    """Keys or values as every head of the queries sees them: each in turn for some neighbours."""
    if tensor.shape[-3] == 1:
        return tensor
    times = queries.shape[-3] // tensor.shape[-3]
    heads = context.live(tensor.axes[-3])
    repeated = None if heads is None else tuple((variable, m * times) for variable, m in heads)
    return Traced(
        (*tensor.shape[:-3], queries.shape[-3], *tensor.shape[-2:]),
        (*tensor.axes[:-3], repeated, *tensor.axes[-2:]),
    )


def attention(context: Context, a: Arguments) -> Traced:
    """softmax(q k^T) v: q, k share their features, k and v their positions, all their heads."""
    q, k, v = a.query, a.key, a.value
    context.unify(q.axes[-1], k.axes[-1])
    context.unify(k.axes[-2], v.axes[-2])
    if getattr(a, "enable_gqa", False):
        k, v = (_shared_heads(context, q, t) for t in (k, v))
    batch = context.broadcast(
        [Traced(t.shape[:-2], t.axes[:-2]) for t in (q, k, v)], shape_of(context.meta)[:-2]
    )
    rows, columns = context.live(q.axes[-2]), context.live(k.axes[-2])
    scores = Traced((*q.shape[:-1], k.shape[-2]), (*batch, rows, columns))
    if isinstance(a.attn_mask, Traced):
        context.broadcast([scores, a.attn_mask], scores.shape)
    value = context.output([*batch, context.live(q.axes[-2]), context.live(v.axes[-1])])
    context.cost(scores, [(q.shape[-1], context.live(q.axes[-1]))])
    context.cost(value, [(k.shape[-2], context.live(k.axes[-2]))])
    return value
