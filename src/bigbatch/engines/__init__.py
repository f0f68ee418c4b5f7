"""One way to run the micro-batches of a batch each."""
