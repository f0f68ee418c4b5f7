"""`make bench`: every figure of this folder."""

from . import batch_norm, by_sample, memory, plan, precision, speed

for module in (memory, speed, by_sample, precision, batch_norm, plan):
    module.main()
