"""What Gymnasium's own environments are about: they say it in their documentation only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Known(NamedTuple):
    """The words of an environment whose observations and actions are numbers."""

    rules: str = ""
    actions: Sequence[str] = ()
    """Of a `Discrete` space, in order."""
    features: Sequence[str] = ()
    """The parts of an observation."""


_LAKE = Known(
    "Walk from S to G over frozen fields F; a hole H ends the game. Your field is in brackets.",
    ("left", "down", "right", "up"),
)
_CLIFF = Known(
    "You are x. Walk to T; a step onto the cliff C leads back to the start.",
    ("up", "right", "down", "left"),
)
_CAR = "Bring the car to position 0.45 or more; it is too weak to climb without swinging."
CLASSIC: Mapping[str, Known] = {
    "Acrobot": Known(
        "Swing the lower end of the two links above the bar, by torque on the joint between them.",
        ("negative", "none", "positive"),
        ("cos 1", "sin 1", "cos 2", "sin 2", "angular velocity 1", "angular velocity 2"),
    ),
    "Blackjack": Known(
        "Come closer to 21 than the dealer, and not above it.",
        ("stick", "hit"),
        ("sum", "dealer's card", "usable ace"),
    ),
    "CartPole": Known(
        "Push the cart so that its pole stays upright.",
        ("left", "right"),
        ("cart position", "cart velocity", "pole angle", "pole angular velocity"),
    ),
    "CliffWalking": _CLIFF,
    "CliffWalkingSlippery": _CLIFF,
    "FrozenLake": _LAKE,
    "FrozenLake8x8": _LAKE,
    "MountainCar": Known(_CAR, ("left", "none", "right"), ("position", "velocity")),
    "MountainCarContinuous": Known(_CAR + " Your number is the force.", (), ("position", "velocity")),
    "Pendulum": Known(
        "Swing the pendulum up and hold it there. Your number is the torque.", (), ("cos", "sin", "angular velocity")
    ),
    "Taxi": Known(
        "Drive the taxi [ ] to the passenger's letter in (), pick up, drive to that in {}, drop off; | is a wall.",
        ("south", "north", "east", "west", "pickup", "dropoff"),
    ),
}
"""By name, without the version."""
