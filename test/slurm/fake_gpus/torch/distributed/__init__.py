"""Holds the stand-in for torchrun."""
