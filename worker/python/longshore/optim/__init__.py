"""Optimizers: torch's own, with their arguments, and Lion. Each also takes the options of a job."""

from longshore.optim.optimizer import Optimizer
from longshore.optim.rules import SGD, Adagrad, Adam, AdamW, Lion, NAdam
from longshore.transfer.job import StepReport

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Lion", "NAdam", "Optimizer", "StepReport"]
