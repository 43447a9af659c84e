"""Meshes of ranks, the placements of tensors on them, and the collectives between their ranks, as
data."""
