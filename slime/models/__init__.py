"""Model families: tensor names, shapes, loading and saving; parsers of model output."""
