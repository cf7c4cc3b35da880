"""Megatron's distributed checkpoints (torch_dist) as tensors, without Megatron."""
