"""Other machines as nodes of a run: placement, file transfer, and the agent process on each node."""
