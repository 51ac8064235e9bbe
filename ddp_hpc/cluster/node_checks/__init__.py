"""What one node says of itself before a training, and what the answers of all nodes mean together."""
