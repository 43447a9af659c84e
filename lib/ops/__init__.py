"""The operators of a model's step, in families.

An operator is a function in a family's module, such as `rms_norm` in `norm.py`. Its body is the
reference: plain torch, which defines the result and runs on the CPU. Its annotations are the
signature. The decorator `weft.ops.register.operator` registers it with torch and names its CUDA
implementation, in a neighbouring module whose name ends in `_triton`. Only such modules import
triton, and they are imported at the first call on CUDA.
"""
