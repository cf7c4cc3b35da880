"""Sends new weights from the trainers to the engines, and checks the version of each update on arrival."""

from slime.weights.publisher import PublishResult, WeightPublisher, WeightSource, WeightVersionMismatch
from slime.weights.transport import choose_transport, make_publisher

__all__ = [
    "PublishResult",
    "WeightPublisher",
    "WeightSource",
    "WeightVersionMismatch",
    "choose_transport",
    "make_publisher",
]
