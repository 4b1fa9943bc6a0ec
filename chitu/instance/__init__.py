"""The parts of P, D and unified instances between `pd_service.py`, `pd_scheduler.py` and the engine."""
