"""Synthetic tasks whose answers can be checked, for the training, tests and demonstrations of chitu-tiny."""
