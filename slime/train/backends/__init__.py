"""Training backends that spread a model over processes, behind one protocol."""
