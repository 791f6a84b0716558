"""Parts of an optimizer: its job on servers, steps, state and guards. :class:`longshore.optim.Optimizer` joins them."""
