"""New weights on their way from the trainer to the engines; each update's version is checked on arrival."""

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
