"""Meshes of ranks, placements of tensors on them, and collectives between their ranks, all as data."""
