"""Tiles: the parts of a product that programs of a kernel compute, and which are chosen for which
shapes."""
