"""The laws: graphify, padding, pipelines and donation do not change results. A broken law raises
`LawViolation`.

A law takes a scenario (a model and a *sequence* of batches, so that a replay follows other replays)
or a random pure function, and compares a transformed run with a run without transforms.
`weft.proofs.evidence.runs.suite` lists them, each with the strategy that draws its cases, and
`weft.proofs.evidence.mutants` plants the bugs that each law must catch.
"""
