"""Inference engines: SGLang's HTTP dialect, its client, engine fleets, and the embedded engine."""
