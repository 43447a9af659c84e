"""Benchmarks of what comes before the first step: the import of weft, and the capture of a ladder."""
