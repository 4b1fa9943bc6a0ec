"""Triton kernels, each beside the function that launches it. Imported only if a CUDA device computes, or by tests under
Triton's interpreter (`TRITON_INTERPRET=1`), which runs the same code on a CPU.

Shapes as in `chitu.ops.interface`. Launchers take contiguous rows and check nothing: `chitu.ops.triton_ops` does.
"""
