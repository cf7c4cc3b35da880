"""Rewards: the built-in verifiers, tournaments, and the hub that selects a verifier for each sample."""
