"""What was written for upstream slime, here: tables of its flags, names and behaviours, and whole runs of its plugins."""
