"""`make bench`: every figure of this folder."""

from . import memory, speed

for module in (memory, speed):
    module.main()
