"""The operators of a model's step, in families.

An operator is a function in a family's module, such as `rms_norm` in `norm.py`. Its body is the
reference: plain torch, which defines the result and runs on the CPU. Its annotations are the
signature. The decorator `weft.ops.register.operator` registers it with torch, and names its CUDA
implementation, which is in a module beside it that ends in `_triton`. Only modules with that ending
import triton, and they are imported at the first call on CUDA.
"""
