"""Common handling of saves in the adapters of frameworks."""


from longshore.errors import RefusedError, warn
from longshore.optim.optimizer import Optimizer


class Saving:
    """Makes the servers write a checkpoint for each save.

    Args:
        checkpoint: without a checkpoint folder on the servers, None warns once and True raises. False never writes checkpoints.
    """

    def __init__(self, checkpoint: bool | None) -> None:
        self._checkpoint = checkpoint
        self._has_warned = False

    def begin(self, optimizer: Optimizer) -> None:
        """Prepares an optimizer when training begins: a framework may take its state before it announces a save."""
        if self._is_lost(optimizer):
            optimizer.saves_all = optimizer.is_in_memory

    def writes(self, optimizer: Optimizer) -> bool:
        """Returns whether the servers write a checkpoint for each save, as far as known before the first one."""
        return self._is_wanted(optimizer) and optimizer.has_checkpoint_folder()

    def _is_lost(self, optimizer: Optimizer) -> bool:
        """Returns whether a checkpoint would end with this process and none was requested."""
        return optimizer.passing_checkpoints is not None and self._checkpoint is None

    def _is_wanted(self, optimizer: Optimizer) -> bool:
        return self._checkpoint is not False and not self._is_lost(optimizer)

    def _save_here(self, optimizer: Optimizer) -> None:
        """Puts the full state into the framework's own file, since the server ends with this process."""
        optimizer.saves_all = optimizer.is_in_memory
        if not optimizer.saves_all and not self._has_warned:
            self._has_warned = True
            message = f"job {optimizer.job} ends with this process, so nothing can go back to this save: name servers= and job="
            warn(message)

    def save(self, optimizer: Optimizer, step: int) -> None:
        """Brings the newest weights into the parameters, and on rank 0 has a checkpoint written, which ``state_dict`` then names.

        A server that ends with this process writes none unless asked, since nobody can return to it. ``state_dict`` then has the full
        state, if the server has it in memory.

        Raises:
            RefusedError: if checkpoints were requested and a server cannot write one.
        """
        optimizer.check_model()
        optimizer.flush()
        if self._is_lost(optimizer):
            self._save_here(optimizer)
        if not self._is_wanted(optimizer) or not optimizer.is_first_rank:
            return
        try:
            optimizer.checkpoint(f"step-{step:08}")
        except RefusedError as error:
            if self._checkpoint:
                raise
            self._checkpoint = False
            message = f"the servers write no checkpoints, so nothing can go back to this save: {error}"
            warn(message)
