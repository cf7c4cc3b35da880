"""Engines of other machines that join a running job and leave it again."""
