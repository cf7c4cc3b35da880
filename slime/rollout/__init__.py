"""Rollout: from prompts to finished, scored samples."""
