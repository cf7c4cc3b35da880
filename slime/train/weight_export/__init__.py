"""Export of weights to engines and folders."""
