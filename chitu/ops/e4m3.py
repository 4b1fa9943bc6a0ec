"""Numbers about e4m3 on GPUs, read by kernels and by who counts memory, so without torch."""

E4M3_CAPABILITY = (8, 9)
"""Lowest compute capability whose kernels read e4m3: Ada and Hopper are the first."""
WIDE_NUMBERS = 1 << 25
"""Numbers of a weight that are widened at a time. 64 MiB in 16 bits: enough outputs for a product to fill a device,
little against a weight."""
