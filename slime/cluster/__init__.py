"""Child processes that never outlive the driver, and the channels, ports and devices that they use."""

from slime.cluster.process import ChildProcess, ProcessSet, process_tree
from slime.cluster.rpc.channel import (
    Channel,
    ChannelClosed,
    ChannelProtocolError,
    ChannelTimeout,
    channel_pair,
)

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
