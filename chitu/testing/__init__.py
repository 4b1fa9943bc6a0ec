"""Doubles, for tests and benchmarks alone: of the product only `bench` imports them.

`fake_executor` (no tensors, every plan checked), `late_executor` (the same as a device that is late); `checksum_engine`
(KV of real bytes, no torch) and its process entry `checksum_scheduler`; `fake_worker` (P and D of a real router,
without either), `router_process`, `steady_load` (what real processes are started and asked with); `fake_transport`;
`reference_ops` (what the kernels are compared with); `clock`.
"""
