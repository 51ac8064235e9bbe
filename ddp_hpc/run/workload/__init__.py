"""What the workers of a run do, as far as launching has to know it: a protocol, a table, and a module for each workload."""
