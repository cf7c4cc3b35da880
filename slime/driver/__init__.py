"""The driver: runs the loop, places the components of a run, shares GPUs in time, and recovers from failures."""
