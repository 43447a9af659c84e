"""Programs that run the laws for long, on many ranks, on a GPU, and against faults."""
