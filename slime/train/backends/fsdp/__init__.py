"""FSDP2 backend: trains transformers' models, sharded over the ranks."""
