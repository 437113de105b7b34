"""Damaged and forged inputs, and what must not come of them; see `validation/run_garbage.py`."""
