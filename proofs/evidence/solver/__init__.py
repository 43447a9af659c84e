"""Proofs that cover all cases: by z3 for unknown numbers, and by trying every interleaving of small
programs."""
