"""Groups of flags."""
