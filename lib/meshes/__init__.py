"""Meshes of ranks, placements of tensors on them, and collectives between ranks, all as data."""
