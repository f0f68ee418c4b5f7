"""The automatic micro-batch size: what ran out of memory, what fits, and which size comes next."""
