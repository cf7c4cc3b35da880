"""Rewards: the built-in verifiers, and the hub that selects a verifier for each sample."""
