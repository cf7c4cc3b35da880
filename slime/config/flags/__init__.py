"""The groups of flags, one file each, in the order in which help and saved configs show them."""
