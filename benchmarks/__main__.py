"""`make bench`: every figure of this folder."""

from . import batch_norm, memory, speed

for module in (memory, speed, batch_norm):
    module.main()
