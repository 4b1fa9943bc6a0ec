"""Stand-in for a torch with CUDA, before the real one on PYTHONPATH. It touches no GPU."""
