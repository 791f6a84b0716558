"""For Accelerate: ``save_state`` has the servers write a checkpoint, which ``load_state`` goes back to."""

from typing import Any

from accelerate import Accelerator

from longshore._optimizer import Optimizer
from longshore._saving import Saving


def attach(accelerator: Accelerator, *, checkpoint: bool | None = None) -> Any:
    """Lets every ``accelerator.save_state`` fetch the newest weights first, and have the servers write a checkpoint for each
    optimizer of this package that was prepared.

    Args:
        checkpoint: None warns where the servers have no folder for checkpoints (``--checkpoint-dir``), True raises, False asks for none.

    Returns:
        A handle, whose ``remove`` ends that.
    """
    saving = Saving(checkpoint)

    def before(models: Any, weights: Any, folder: Any) -> None:
        for wrapped in accelerator._optimizers:
            optimizer = getattr(wrapped, "optimizer", wrapped)
            if isinstance(optimizer, Optimizer):
                saving.save(optimizer, optimizer.version)

    return accelerator.register_save_state_pre_hook(before)
