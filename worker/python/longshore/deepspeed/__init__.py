"""DeepSpeed's shape: ``longshore.initialize``, its engine, its configuration and its schedules."""
