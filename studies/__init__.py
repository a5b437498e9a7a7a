"""Studies: a task, mechanisms and probes put together to answer a question."""
