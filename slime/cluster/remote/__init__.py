"""Other machines as nodes of a run: what is asked of them, what is brought there, who acts for the run there."""
