"""`shard`: a function of one rank's part runs on every rank of a mesh, with collectives as effects
of its program."""
