"""`shard`: a function written for one rank's part runs on every rank of a mesh; its collectives are
effects of its program."""
