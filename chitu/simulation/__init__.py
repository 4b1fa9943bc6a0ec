"""A whole cluster in one thread and virtual time: real routers, schedulers and transfer machines, and faults.

`cluster.py` is what sizing, benchmarks and tests use. A `SimulatedProcess` is one P, D or unified process, and a
`SimulatedRouter` a router: both are the real parts without threads and sockets. `events.py` has the time, `network.py`
what lies between them, `engine.py` and `transfers.py` what computing and writing cost. Another world that has the same
parts may let time pass in another way: the scripts of faults of `test/protocol` go turn by turn, with KV of real bytes.
"""
