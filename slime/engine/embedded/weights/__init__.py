"""New weights for the model that is being served, in place: files, blobs, deltas, process groups."""
