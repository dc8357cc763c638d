"""For tests, those of plug-in authors too: the contract of a tier, faults and latency around any tier, leaks."""
