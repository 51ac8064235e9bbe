"""Why an attempt failed: the rank that failed first, the class of the failure, its evidence, and what to do."""
