"""Not here: 4-bit weights."""

from common import refuse

if __name__ == "__main__":
    refuse("4-bit weights are not read in this version: multiply them out with the tool of the model's makers")
