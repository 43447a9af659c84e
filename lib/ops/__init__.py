"""The operators that piecewise capture splits at: each a torch.library custom op with a fake and a CPU reference."""
