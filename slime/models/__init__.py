"""Facts per model family: names, shapes, loading and saving."""
