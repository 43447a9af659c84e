"""Proofs for all cases at once: by z3 on unknown numbers, and by every interleaving of small programs."""
