"""Faults that tests plant in a running engine's process; called by ``Engine("call", function=…, arguments=…)``."""
