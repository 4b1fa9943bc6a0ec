"""How many P and D a load needs: the real control plane in virtual time, over engines of measured speed.

`workload` reads traces; `search` looks for the split that serves most within an SLO, in the simulated cluster of
`chitu/simulation`, and `report` tells it.
"""
