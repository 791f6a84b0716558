"""Models larger than their device: units of weights that come before their use and go after it."""
