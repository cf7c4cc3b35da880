"""Facts per model family: which tensors a folder has, what Megatron calls them, what its config says."""
