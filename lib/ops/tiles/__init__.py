"""Tiles: the part of a product that one program of a kernel computes, and how a tile is chosen for
given shapes."""
