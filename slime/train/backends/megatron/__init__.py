"""Megatron-Core as trainer: this folder alone imports megatron, and it is imported only where it was chosen."""
