"""DeepSpeed's interface: ``longshore.initialize``, its engine, its configuration and its schedules."""
