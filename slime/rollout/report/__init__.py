"""What people are told about a rollout while it is made, and after."""
