"""Memory that processes share or give back: on the device, in shared memory, pinned on the host."""
