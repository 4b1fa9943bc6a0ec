"""Stands for a torch with CUDA, in front of the real one on PYTHONPATH: no GPU is touched here."""
