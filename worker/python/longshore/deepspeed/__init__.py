"""DeepSpeed's configuration, and the files of :mod:`longshore.engine`."""
