"""The engines of a run: which ones, started together or attached, watched over, brought back."""
