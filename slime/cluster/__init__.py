"""Where processes run: child processes that never outlive the driver, and the channels, ports and devices they use."""

from slime.cluster.channel import Channel, ChannelClosed, ChannelProtocolError, ChannelTimeout, channel_pair
from slime.cluster.process import ChildProcess, ProcessSet, process_tree

__all__ = [
    "Channel",
    "ChannelClosed",
    "ChannelProtocolError",
    "ChannelTimeout",
    "ChildProcess",
    "ProcessSet",
    "channel_pair",
    "process_tree",
]
