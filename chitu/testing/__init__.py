"""Test doubles, only for tests and benchmarks: of the product only `bench` imports them.

`fake_executor` (no tensors, every plan checked), `late_executor` (the same with steps that finish late);
`checksum_engine` (KV of real bytes, no torch) and its process entry `checksum_scheduler`; `fake_worker` (P and D of a
real router, without either), `router_process`, `steady_load` (start real processes and send them requests);
`fake_transport`; `reference_ops` (the kernels are compared with them); `clock`.
"""
