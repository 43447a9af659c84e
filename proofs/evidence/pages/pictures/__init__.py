"""Pictures, which `weft.proofs.evidence.pages.measured` draws from the records in
`proofs/results/`: `modes`, `roofline`, `tiles`."""
