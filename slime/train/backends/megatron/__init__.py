"""Megatron-Core backend: tensor, pipeline, context, expert and data parallelism. No other package imports megatron."""
