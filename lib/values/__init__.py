"""Values of any kind: trees of them and the tensors that they hold, keys, schemas, and donation."""
