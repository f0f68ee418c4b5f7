"""The bricks of every engine: batches are cut, moved, weighed and compared here; tensors in, tensors out."""
