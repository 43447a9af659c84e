"""Pictures, which `weft.proofs.measured` draws from the records in `proofs/results/`: `modes`,
`roofline`, `tiles`."""
