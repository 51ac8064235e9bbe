"""What libraries with training loops of their own need to run under ddp-hpc: one module a library."""
