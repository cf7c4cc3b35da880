"""A last look at the data of each training rank, once log-probs and advantages are there: clip the advantages.

--rollout-data-postprocess-path examples/plugins/data_postprocess.py
"""


def data_postprocess(args, rollout_id, rollout_data):
    """Change `rollout_data` in place; its per-token lists hold one tensor for each sample."""
    rollout_data["advantages"] = [values.clamp(-2.0, 2.0) for values in rollout_data["advantages"]]
