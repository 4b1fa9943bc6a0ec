"""How many P and D a load needs: the real control plane in virtual time, over engines of measured speed.

`profile` says how long a step takes. `engine`, `instance` and `cluster` make the simulated cluster of the real parts;
`workload` reads traces; `search` looks for the split that serves most within an SLO, and `report` tells it.
"""
