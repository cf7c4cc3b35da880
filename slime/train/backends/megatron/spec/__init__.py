"""Layers of plain torch under Transformer Engine's parameter names, and the choice between the two."""
