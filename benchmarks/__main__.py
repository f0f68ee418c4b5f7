"""`make bench`: every figure of this folder."""

from . import batch_norm, by_sample, memory, precision, speed

for module in (memory, speed, by_sample, precision, batch_norm):
    module.main()
