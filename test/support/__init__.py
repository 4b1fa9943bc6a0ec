"""Doubles of the engine, transports, instances and clocks, for tests and `benchmark/`. Not in the wheel."""
