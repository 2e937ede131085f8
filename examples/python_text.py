"""The text of Python's standard library, which is on every machine (PSF licence), as bytes."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

IGNORED = -100  # the target of what is not to be predicted
END = 0  # ends a file and fills a row; source code has no such byte
WORDS = 256


def python_files(most_bytes: int, for_tuning: bool = False) -> tuple[list[bytes], list[bytes]]:
    """Source files for training, and every tenth of them for evaluation, chosen by its name.

    They come in an order that is random and always the same. To compare settings without a look at
    the files of the final evaluation, `for_tuning` leaves these out and takes another tenth.
    """
    library = Path(sysconfig.get_path("stdlib"))
    found = [path for path in library.rglob("*.py") if "site-packages" not in path.parts]
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    read = 0
    for path in sorted(found, key=lambda path: _digest(path.relative_to(library))):
        if read >= most_bytes:
            break
        text = path.read_bytes().replace(b"\0", b"")
        read += len(text)
        tenth = _digest(path.relative_to(library))[-1] % 10
        if for_tuning and tenth == 0:
            continue
        parts[tenth == (1 if for_tuning else 0)].append(text)
    return parts


def _digest(path: Path) -> bytes:
    return hashlib.sha256(path.as_posix().encode()).digest()


class Rows:
    """Rows of tokens cut from files; a row ends with its file, and is then filled up.

    The attention is causal, so what fills a row changes nothing before it, and needs no mask.
    """

    def __init__(self, files: list[bytes], length: int) -> None:
        self.length = length
        self.text = torch.frombuffer(bytearray(b"\0".join(files) + b"\0"), dtype=torch.uint8)
        ends = (self.text == END).nonzero().flatten()
        self.end_of = ends[torch.searchsorted(ends, torch.arange(len(self.text)))]

    def at(self, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens, and the same as targets: `IGNORED` after the end of the file."""
        places = starts[:, None] + torch.arange(self.length)
        last = self.end_of[starts][:, None]
        tokens = self.text[places.minimum(last)].long()
        return tokens, tokens.masked_fill(places > last, IGNORED)

    def batch(self, number: int, size: int, seed: int) -> tuple[Tensor, Tensor]:
        """The batch of one step: the same whenever it is asked for, so that a run can go on."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
        return self.at(torch.randint(len(self.text), (size,), generator=generator))

    def spread(self, count: int, size: int) -> list[tuple[Tensor, Tensor]]:
        """`count` batches that are evenly spread over the text."""
        starts = torch.linspace(0, len(self.text) - 1, count * size).long()
        return [self.at(part) for part in starts.split(size)]
