"""Megatron-Core: the model cut by tensor, pipeline, context, experts and data. Nothing outside imports megatron."""
