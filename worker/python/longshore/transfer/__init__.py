"""What every framework shares: options and settings of a job, its parameters, and their way to and from the servers."""
