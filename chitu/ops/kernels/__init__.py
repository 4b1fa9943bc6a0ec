"""Triton kernels, each beside the function that launches it. Imported only where a CUDA device computes, or by tests
under Triton's interpreter (`TRITON_INTERPRET=1`), where the same code runs on a CPU.

Shapes as in `chitu.ops.interface`. Launchers take contiguous rows and check nothing: `chitu.ops.triton_ops` does.
"""
