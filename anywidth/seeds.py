"""Random seeds that depend on what is drawn and when, never on what was drawn before."""

from hashlib import blake2b


def derive_seed(purpose: str, *numbers: int) -> int:
    """Return a seed for one draw, say ``derive_seed("order", seed, epoch)``.

    Every process and every resumed run derives the same one, and two purposes never share theirs.
    """
    digest = blake2b(repr((purpose, *map(int, numbers))).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
