"""Deltas between two versions of a model: the format of one tensor's change (`blob`), of a folder of them (`folder`),
and their application to tensors in memory or to the files of a model folder (`apply`).

The trainers compute the changes (`slime.train.weight_export.delta`); `slime.weights.delta` decides which deltas are
sent and when.
"""
