"""Strategies for captured functions: random functions and programs on tensors, calls of them, and
known hazards."""
