"""What P, D and unified instances are made of, between `pd_service.py` and `pd_scheduler.py` and the engine."""
