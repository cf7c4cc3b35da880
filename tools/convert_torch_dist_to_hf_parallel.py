"""The same as convert_torch_dist_to_hf.py: writing a checkpoint waits for the disk, not for a processor."""

from convert_torch_dist_to_hf import main

if __name__ == "__main__":
    main()
