"""Ends: carry tensors between processes by gloo, by NCCL, or by stores into memory that GPUs
share."""
