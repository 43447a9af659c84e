"""Benchmarks of single operators: the kernels of a layer, attention, sampling, and transfers
between GPUs."""
