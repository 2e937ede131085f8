"""Find out cheaply whether a network still has the weights its statistics were computed with.

PyTorch counts the changes of a tensor (`_version`), except those by fused optimizers and through
`.data`. Therefore the first value of each parameter is compared too: every width uses it, so
training changes it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# Relative difference of two norms of a parameter: summed in another order, or cast.
_SUMMED, _CAST = 1e-5, 2e-2


@dataclass(frozen=True, eq=False)
class Fingerprint:
    """The first value, the norm and the dtype of each parameter of a network."""

    values: Tensor
    norms: Tensor
    dtypes: tuple[torch.dtype, ...]

    def fits(self, other: Fingerprint, counting: Sequence[int]) -> bool:
        """Whether both belong to the same weights; only the parameters `counting` are compared."""
        if self is other:
            return True
        if len(self.dtypes) != len(other.dtypes):
            return False
        was_cast = self.dtypes != other.dtypes
        pairs = [(self.values, other.values, 0.0), (self.norms, other.norms, _SUMMED)]
        return all(
            torch.allclose(
                mine[counting],
                its[counting],
                rtol=_CAST if was_cast else near,
                atol=1e-4 if was_cast else 0.0,
                equal_nan=True,
            )
            for mine, its, near in pairs
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Fingerprint:
        return self


OUTDATED = Fingerprint(torch.empty(0), torch.empty(0), ())
"""Fits no network; for statistics that are too old for any weights."""


class Trainings:
    """How often the weights may have been trained; replicas of a network share it."""

    def __init__(self) -> None:
        self.count = 0


class Weights:
    """The parameters of a network, watched for changes.

    `after_norms` names parameters on which no norm depends, such as a classifier's, if known.
    """

    def __init__(self, root: nn.Module | None) -> None:
        self._root = None if root is None else weakref.ref(root)
        self.after_norms: frozenset[str] = frozenset()
        self.trainings = Trainings()
        self.initial: Fingerprint | None = None  # when it was converted, if it was new then
        self.forget()

    def __deepcopy__(self, memo: dict[int, Any]) -> Weights:
        root = memo.get(id(self.root))
        copy = Weights(root if isinstance(root, nn.Module) else None)  # None: a part copied alone
        copy.after_norms = self.after_norms
        copy.trainings = deepcopy(self.trainings, memo)
        copy.initial = self.initial
        return copy

    def __reduce__(self) -> tuple[Any, ...]:
        return Weights, (None,), {"after_norms": self.after_norms, "initial": self.initial}

    @property
    def root(self) -> nn.Module | None:
        return None if self._root is None else self._root()

    def watch(self, root: nn.Module) -> None:
        if self.root is not root:
            self._root = weakref.ref(root)
            self.forget()

    def forget(self) -> None:
        """Drop all references to tensors; the next fingerprint is computed from scratch."""
        self.verdict: bool | None = None  # whether the present width's statistics are of them
        self.checker: object = None  # the norm that asks once per pass, for all others
        self.is_stale = False  # the last verdict, where it was against them
        self.is_fresh = False  # whether the verdict was found in this pass
        self._read_at: int | None = None
        self._held: list[tuple[dict[str, Any], str]] = []
        self._counting: list[int] = []
        self._marks: list[tuple[int, int]] = []
        self._views: list[Tensor] = []
        self._values = torch.empty(0)
        self._last: Fingerprint | None = None

    def belong_to(self, made_with: Fingerprint | None, now: Fingerprint) -> bool:
        """Whether statistics that were made with some weights belong to the weights of `now`."""
        return made_with is None or made_with.fits(now, self._counting)

    def are_initial(self) -> bool:
        """Whether the weights are still those of the new network that was converted."""
        now = None if self.initial is None else self.fingerprint()
        return now is not None and self.belong_to(self.initial, now)

    def fingerprint(self) -> Fingerprint | None:
        """The fingerprint of the present weights; None if they cannot be read, as in a trace.

        Reading values waits for a GPU. There they are read once after each change of mode and each
        training pass, and whenever PyTorch counts a change.
        """
        if torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack():
            return None
        tensors = self._tensors()
        try:
            marks = [(tensor.data_ptr(), tensor._version) for tensor in tensors]
        except RuntimeError:  # they have no memory, or were made in inference mode
            return None
        is_same = self._last is not None and marks == self._marks
        trainings = self.trainings.count
        if is_same and self._read_at == trainings and tensors[0].is_cuda:
            return self._last
        if not tensors or not (is_same or all(_is_plain(tensor) for tensor in tensors)):
            return None
        if tensors[0].is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        with torch.no_grad():
            if not is_same:
                self._views = [_first_value(tensor) for tensor in tensors]
            values = _gathered(self._views)
            if not is_same or not torch.equal(values, self._values):
                norms = _gathered([_norm(tensor) for tensor in tensors])
                dtypes = tuple(tensor.dtype for tensor in tensors)
                found = values.cpu().double(), norms.cpu().double()
                self._last = Fingerprint(*found, dtypes)
            self._marks, self._values, self._read_at = marks, values, trainings
        return self._last

    def _tensors(self) -> list[Tensor]:
        if self.root is None:
            return []
        tensors = [held.get(name) for held, name in self._held]
        if not tensors or any(tensor is None for tensor in tensors):
            names = [
                (f"{path}.{name}", module._parameters, name)
                for path, module in self.root.named_modules()
                for name, tensor in module._parameters.items()
                if tensor is not None
            ]
            self._held = [(held, name) for _, held, name in names]
            self._counting = [i for i, name in enumerate(names) if name[0] not in self.after_norms]
            tensors = [held[name] for held, name in self._held]
        return tensors  # type: ignore[return-value]


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has all its values here, unlike a sharded or meta tensor."""
    return type(tensor) in (nn.Parameter, Tensor) and not tensor.is_meta


def _first_value(tensor: Tensor) -> Tensor:
    """A view of the first value, whose place does not depend on the memory format."""
    whole = tensor.detach()
    if whole.is_complex():
        whole = torch.view_as_real(whole.resolve_conj())
    return whole.as_strided((min(1, whole.numel()),), (1,), whole.storage_offset())


def _norm(tensor: Tensor) -> Tensor:
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    return torch.linalg.vector_norm(tensor.detach(), dtype=dtype).view(1)


def _gathered(parts: list[Tensor]) -> Tensor:
    """Many tensors as one, also from several devices."""
    devices = {part.device for part in parts}
    return torch.cat(parts if len(devices) == 1 else [part.cpu() for part in parts])
