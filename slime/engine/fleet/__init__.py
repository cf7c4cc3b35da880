"""Engine fleets of a run: choice of the backend, start or attach, supervision, restart."""
