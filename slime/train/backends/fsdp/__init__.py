"""FSDP2: transformers' models, sharded over the ranks."""
