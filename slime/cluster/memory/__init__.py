"""Memory that processes share or release: on the device, in shared memory, pinned on the host."""
