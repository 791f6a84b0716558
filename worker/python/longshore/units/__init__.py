"""Models larger than their device: units of weights that are fetched before their use and released after it."""
