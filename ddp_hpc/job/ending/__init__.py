"""Why an attempt ended, and what follows."""
