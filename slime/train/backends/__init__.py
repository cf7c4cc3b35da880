"""Ways to spread a policy over processes, behind one small protocol."""
