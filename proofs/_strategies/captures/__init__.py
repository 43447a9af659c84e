"""Strategies for captures: random functions and programs on tensors, calls of them, and known
hazards."""
