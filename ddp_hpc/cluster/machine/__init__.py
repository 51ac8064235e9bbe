"""How busy the GPUs and CPUs of a node are: sampled by a process of its own, beside the workers."""
