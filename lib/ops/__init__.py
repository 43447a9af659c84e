"""The operators that piecewise capture splits at: each a custom op of torch with a fake and a CPU reference, and a
functional form for derivatives."""
