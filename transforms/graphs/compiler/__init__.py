"""Compiling what a graph repeats: `graphify(..., compiler="inductor")`."""
