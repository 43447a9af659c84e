"""Benchmarks: `python -m weft.proofs.evidence.bench.NAME --out FOLDER` prints a short table last
and writes JSON.

Those of single operators are `operators.NAME`, those of the time before a first step
`startup.NAME`.
"""
