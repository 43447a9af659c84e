"""The Hypothesis strategies from which the laws draw; `weft.proofs.strategies` has the public ones."""
