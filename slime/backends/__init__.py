"""Import paths of upstream slime's training backend that plugins use; the trainer itself is `slime.train`."""
