"""What runs on each node of a job: the agent, the tasks that srun and torchrun start, and their CPUs."""
