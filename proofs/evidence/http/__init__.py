"""Hostile clients and a mixed load on a real `weft serve`."""
