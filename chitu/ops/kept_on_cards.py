"""What GPUs keep as small as it is stored, for kernels and for who counts memory, so without torch."""

E4M3_CAPABILITY = (8, 9)
"""Lowest compute capability whose kernels read e4m3: Ada and Hopper are the first."""
WIDE_NUMBERS = 1 << 25
"""Numbers of a weight that are widened at a time. 64 MiB in 16 bits: enough outputs for a product to fill a device,
little against a weight."""
RUNS_OF = {"e4m3": 32, "e2m1": 16, "int4": 16}
"""Number by which a run of each form can be divided, unless it has all inputs. A block of a product has as many inputs
of e4m3, as it crosses no runs; of 4 bits each number has its own scale before it is multiplied."""


def keeps_on_cards(form: str, run: int, inputs: int) -> bool:
    """Return whether the kernels take a weight of this form with a scale for each `run` of so many inputs."""
    return form in RUNS_OF and (run >= inputs or run % RUNS_OF[form] == 0)
