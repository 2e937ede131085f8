"""Failures of the machine, which are nobody's mistake: no memory, a process that was killed."""

from __future__ import annotations

_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "Storage size calc")


def explained(error: BaseException) -> str | None:
    """One line about a failure that this program knows; None for any other."""
    said = " ".join(str(error).split())
    is_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if is_memory or any(words in said for words in _NO_MEMORY):
        return (
            f"not enough memory ({said[:200] or type(error).__name__}); use smaller inputs, a "
            "smaller --batch-size or a narrower network"
        )
    if said.startswith("DataLoader worker"):
        return (
            f"a process that decodes images ended ({said[:200]}); it may have had too little "
            "memory: continue the run with --resume and fewer --workers"
        )
    return None
