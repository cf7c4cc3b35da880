"""`slime plan`: the memory, layout and duration of a run before it starts."""
