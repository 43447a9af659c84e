"""Benchmarks: `python -m weft.proofs.bench.NAME --out FOLDER` prints a short table last and writes JSON."""
