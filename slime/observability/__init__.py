"""Import paths of traces, timers and metrics that slime plugins use: the names of `slime.utils`."""
