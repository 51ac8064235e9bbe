"""What a user asks about a machine, an image or a site before training on it."""
