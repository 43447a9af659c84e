"""Captured graphs: `graphify`, `piecewise`, and the parts that they are made of."""
