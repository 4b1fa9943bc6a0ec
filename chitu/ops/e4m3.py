"""What is kept in e4m3 on GPUs, for kernels and for who counts memory, so without torch."""

E4M3_CAPABILITY = (8, 9)
"""Lowest compute capability whose kernels read e4m3: Ada and Hopper are the first."""
WIDE_NUMBERS = 1 << 25
"""Numbers of a weight that are widened at a time. 64 MiB in 16 bits: enough outputs for a product to fill a device,
little against a weight."""
MIN_RUN = 32
"""Number by which a run can be divided, unless it has all inputs: a block of a product has as many."""


def keeps_e4m3(form: str, run: int, inputs: int) -> bool:
    """Return whether the kernels take a weight of this form with a scale for each `run` of so many inputs."""
    return form == "e4m3" and (run >= inputs or run % MIN_RUN == 0)
