"""One module for each kind of kernel; `checks()` of each yields (what, error, bound)."""
