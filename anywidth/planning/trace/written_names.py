"""The names in the statement of the network's code that called an operation.

The graph shows the sizes of a cut. Several numbers of a module may be equal by chance, and the
statement says which of them the code gives.
"""

from __future__ import annotations

import ast
import functools
import linecache
import re

from torch.fx import Node

_FRAME = re.compile(r'File "(.+)", line (\d+)')


def last_line(node: Node) -> tuple[str, int] | None:
    """The line of the network's code that called an operation."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    return (frames[-1][0], int(frames[-1][1])) if frames else None


def written_names(node: Node) -> frozenset[str]:
    """The names and attributes in the statement that called an operation."""
    line = last_line(node)
    if line is None:
        return frozenset()
    around = (s for s in _statements(line[0]) if s[0] <= line[1] <= s[1])
    shortest = min(around, key=lambda s: s[1] - s[0], default=None)
    return frozenset() if shortest is None else shortest[2]


@functools.lru_cache(maxsize=64)
def _statements(file: str) -> list[tuple[int, int, frozenset[str]]]:
    """First line, last line and names of each simple statement of a file."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return []
    return [
        (node.lineno, node.end_lineno or node.lineno, _names(node))
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.Expr | ast.Return)
    ]


def _names(statement: ast.AST) -> frozenset[str]:
    inner = [node for node in ast.walk(statement) if isinstance(node, ast.Attribute | ast.Name)]
    return frozenset(n.attr if isinstance(n, ast.Attribute) else n.id for n in inner)
