"""Which microbatch runs where and when in a pipeline, and the function that runs it."""
