"""The languages that clients speak: each one a translator between its bodies and our words, without any I/O."""
