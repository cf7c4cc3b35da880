"""Pure tensor functions of reinforcement learning: no I/O, no config object, no process groups."""
