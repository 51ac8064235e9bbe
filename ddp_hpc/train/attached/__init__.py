"""What `ddp_hpc.attach` gives a user's own script: agreed stops, committed checkpoints, a report, and our data order."""
