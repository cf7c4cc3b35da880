"""Loads new weights into the served model, in place, from files, blobs, deltas, shared memory and process groups."""
