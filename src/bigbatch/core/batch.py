"""One batch on its way through a model: as it was delivered, as it is cut, and what it runs on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bigbatch.core.buffers import Buffers
from bigbatch.core.move import ahead, to_device
from bigbatch.core.split import Piece


@dataclass(frozen=True)
class Batch:
    """A batch in micro-batches, and the modules that they run through.

    Attributes:
        source: the parts of the batch as they were delivered (inputs, targets, ...), where the user left them.
        pieces: the micro-batches.
        inner: the modules that a forward runs through, each once.
        buffers: their buffers; they move once, however often a forward runs.
        device: where the model lives; None leaves the micro-batches where they are.
    """

    source: Sequence[Any]
    pieces: Sequence[Piece]
    inner: Sequence[nn.Module]
    buffers: Buffers
    device: torch.device | None

    def there(self) -> Iterable[Piece]:
        """The micro-batches on the model's device, each brought there one ahead."""
        device = self.device
        if device is None or all(to_device(part, device) is part for part in self.source):
            return self.pieces
        return ahead(self.pieces, device)
