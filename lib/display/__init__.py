"""Terminals and notebooks: tables, plots, HTML, and values with many tensors in one line."""
