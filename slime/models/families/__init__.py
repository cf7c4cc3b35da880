"""Model families: the tensors of a folder, their Megatron parameters and the fields of config.json."""
