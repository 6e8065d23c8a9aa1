"""Who does independent work: this process, others of this machine, or a cluster."""
