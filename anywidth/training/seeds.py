"""Random seeds that depend on their purpose and step, never on earlier draws."""

from hashlib import blake2b


def derive_seed(purpose: str, *numbers: int) -> int:
    """Return a seed for one draw, such as ``derive_seed("order", seed, epoch)``.

    Every process and every resumed run derives the same seed; two purposes never share one.
    """
    digest = blake2b(repr((purpose, *map(int, numbers))).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
