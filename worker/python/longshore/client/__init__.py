"""A rank of a job for any framework: gradients go in and weights come out as arrays."""

from longshore.client.client import Client, Shape
from longshore.transfer.job import Hyper, StepReport

__all__ = ["Client", "Hyper", "Shape", "StepReport"]
