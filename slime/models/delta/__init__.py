"""Deltas between two versions of a model: the format of one tensor's change (`blob`), of a folder of them (`folder`),
and how they are put to tensors in memory or to the files of a model folder (`apply`).

What changed is found where the weights are (`slime.train.weight_export.delta`); `slime.weights.delta` decides what travels
when.
"""
