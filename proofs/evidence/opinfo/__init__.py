"""Torch's operator database as a test of `graphify`: each sample of each operator, compared with
eager bit for bit.

python -m weft.proofs.evidence.opinfo --out proofs/results
"""
